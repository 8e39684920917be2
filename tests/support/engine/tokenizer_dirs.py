"""Tokenizer directories as transformers writes them: byte-level as Qwen's, and with byte fallback as Llama's. Small, made on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "the quick brown fox jumps over the lazy dog, then it's gone; don't wait 12 345 times",
    "Straße, naïve café, 東京都 日本語 テスト, Привет мир, 안녕하세요 🙂🙃 👩‍👩‍👧 €uro",
    "def main():\n    return {'a': 1}\n\n\nif __name__ == '__main__':\n\tmain()\n",
    "aaa bbb ab ba abab stop STOP </s> END END. END!",
]
CHATML = (
    "{%- if messages[0].role == 'system' %}\n"
    "    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}\n"
    "{%- endif %}\n"
    "{%- for message in messages %}\n"
    "    {%- if message.role in ('user', 'assistant', 'tool') %}\n"
    "        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\n"
    "    {%- elif message.role != 'system' %}\n"
    "        {{- raise_exception('unknown role ' + message.role) }}\n"
    "    {%- endif %}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "    {%- if enable_thinking is defined and enable_thinking is false %}\n"
    "        {{- '<think>\\n\\n</think>\\n\\n' }}\n"
    "    {%- endif %}\n"
    "{%- endif %}\n"
)
_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def byte_level() -> Tokenizer:
    """A byte-level BPE with special tokens in chat form, and added tokens that are not special."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=480, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(CORPUS, trainer)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    made.add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>", "a b")]
    )
    return made


def with_fallback() -> Tokenizer:
    """A BPE over characters with byte fallback, as sentencepiece models are converted to; it adds `<s>` to a text."""
    special = ["<unk>", "<s>", "</s>"]
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=460, special_tokens=special + fallback, limit_alphabet=60, show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    made = _without_special_bytes(made, set(fallback))
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    return made


def _without_special_bytes(made: Tokenizer, fallback: set[str]) -> Tokenizer:
    """The trainer needs the byte tokens as special ones; converted models have them in the vocabulary only."""
    described = json.loads(made.to_str())
    described["added_tokens"] = [
        token for token in described["added_tokens"] if token["content"] not in fallback
    ]
    return Tokenizer.from_str(json.dumps(described))


def write(directory: Path, made: Tokenizer, template: object = None, **config: Any) -> Path:
    """A directory with the tokenizer, and the template in its configuration."""
    directory.mkdir(parents=True, exist_ok=True)
    made.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config}
    if template is not None:
        settings["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return directory


def write_byte_level(directory: Path, template: object = CHATML) -> Path:
    """A directory as Qwen's."""
    return write(directory, byte_level(), template, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def write_with_fallback(directory: Path, template: object = None) -> Path:
    """A directory as Llama's."""
    return write(directory, with_fallback(), template, bos_token="<s>", eos_token="</s>", unk_token="<unk>")

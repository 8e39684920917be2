"""A byte-level BPE tokenizer made of nothing: all bytes, invented merges that fill the vocabulary, special tokens, a chat template.

Every text becomes tokens and comes back as it was; every token has a text.
"""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Iterator
from pathlib import Path

from liveweight.errors import EngineConfigInvalid, MissingExtra

END, START, STOP, PAD = SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
BYTES = 256
SPACE = "Ġ"
"""A space, as byte-level tokenizers write it."""
CHAT = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def special_ids(vocab: int) -> dict[str, int]:
    """The ids of the special tokens, which are the last ones of the vocabulary; EngineConfigInvalid for one that is too small."""
    if vocab < BYTES + len(SPECIALS):
        raise EngineConfigInvalid(
            f"a vocabulary of {vocab} has no room for {BYTES} bytes and the special tokens"
        )
    first = vocab - len(SPECIALS)
    return {"bos": first, "end": first, "start": first + 1, "eos": first + 2, "pad": first + 3}


def merges(count: int) -> list[tuple[str, str]]:
    """That many merges: letters after a space or a letter, then one letter more, and so on."""
    return list(itertools.islice(_merges(), count))


def _merges() -> Iterator[tuple[str, str]]:
    letters = string.ascii_lowercase
    longest = [*SPACE, *letters]
    while True:
        pairs = [(left, letter) for left in longest for letter in letters]
        yield from pairs
        longest = [left + right for left, right in pairs]


def write_tokenizer(directory: Path, vocab: int) -> None:
    """`tokenizer.json` and `tokenizer_config.json`."""
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    except ModuleNotFoundError as error:
        raise MissingExtra("init-model", "engine") from error
    ids = special_ids(vocab)
    invented = merges(ids["end"] - BYTES)
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in invented)]
    model = models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=invented)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(token)): {"content": token, "special": True, "normalized": False}
            for token in SPECIALS
        },
        "bos_token": None,
        "chat_template": CHAT,
        "clean_up_tokenization_spaces": False,
        "eos_token": STOP,
        "pad_token": PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

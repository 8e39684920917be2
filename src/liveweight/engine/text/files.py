"""Files of a model directory that describe its text: read once, and named when they are missing or broken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from liveweight.errors import CheckpointInvalid
from liveweight.spec.decoders import from_json

SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""What a tokenizer's configuration calls its special tokens; templates see them under these names."""


def read_text(path: Path) -> str:
    """The file's text. CheckpointInvalid, in one line, if there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise CheckpointInvalid(f"{path.parent}: {path.name} is missing") from error
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointInvalid(f"{path}: cannot be read: {first_line(error)}") from error


def tokenizer_config(directory: Path) -> dict[str, Any]:
    """What tokenizer_config.json says; nothing, where there is none."""
    path = directory / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        return from_json(read_text(path), dict[str, Any])
    except msgspec.MsgspecError as error:
        raise CheckpointInvalid(f"{path}: {first_line(error)}") from error


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The special tokens that the configuration names, as text."""
    found = {}
    for name in SPECIAL_NAMES:
        match config.get(name):
            case str(text) | {"content": str(text)}:
                found[name] = text
    return found


def first_line(error: Exception) -> str:
    """What an error of another library says, on one line."""
    return str(error).strip().partition("\n")[0] or type(error).__name__

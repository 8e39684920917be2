"""Text and tokens: the tokenizer of a model directory, its chat template, and answers that grow token by token.

Owns the conversion of text to ids and back. Which ids end an answer, and what is done with its text, is the engine's.
"""

from __future__ import annotations

from liveweight.engine.text.chat import ChatTemplate
from liveweight.engine.text.stream import TextStream
from liveweight.engine.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "TextStream", "Tokenizer"]

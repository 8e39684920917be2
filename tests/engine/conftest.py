"""What the engine's suites share: the word of transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines import Logits


@pytest.fixture(scope="session")
def transformers_logits() -> Callable[[Path], Logits]:
    """HF's own logits for a directory, in float32."""
    loaded: dict[Path, Any] = {}

    def of(directory: Path) -> Logits:
        if directory not in loaded:
            from transformers import AutoModelForCausalLM

            loaded[directory] = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

        def logits(tokens: Sequence[int]) -> torch.Tensor:
            with torch.no_grad():
                table: torch.Tensor = loaded[directory](torch.tensor([list(tokens)])).logits[0]
            return table

        return logits

    return of

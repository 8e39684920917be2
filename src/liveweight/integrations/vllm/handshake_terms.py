"""What a trainer sends vLLM's workers in its handshake. Shared by client/ and workers/."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Verify: TypeAlias = Literal["staged", "installed"]
"""What a commit verifies: the staged tensors in host memory, before they are installed; or also, where it can be read, vLLM's model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandshakeTerms:
    """Where the leader is to listen, and what a round may cost.

    Every handshake has a new `session`. The leader reports the latest ones: by them, trainers and the other workers recognise the leader.
    """

    address: str
    session: str
    pace_bytes_per_s: float | None
    timeout_s: float

"""What a trainer says to vLLM's workers when it meets them; both halves know it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Verify: TypeAlias = Literal["staged", "installed"]
"""What a commit makes sure of: what lay in the host's memory before it was installed; or also, where it can be read, what is installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandshakeTerms:
    """Where its leader shall listen, and what a round may cost.

    `session` is another one in every meeting. The leader says the last ones: by them, trainers and the other workers know it.
    """

    address: str
    session: str
    pace_bytes_per_s: float | None
    timeout_s: float

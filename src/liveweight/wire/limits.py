"""Limits: how much a peer may make us hold, and how long it may be silent.

Owns the numbers; the codec, the channels and the descriptor server keep to them.
"""

from __future__ import annotations

from dataclasses import dataclass

DESCRIPTORS_PER_MESSAGE = 253
"""What Linux lets one unix message carry (SCM_MAX_FD)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireLimits:
    """What one socket accepts. Both sides of a channel should hold the same value."""

    message_bytes: int = 64 * 1024 * 1024
    """One frame, header and body; a larger one is refused before it is allocated."""
    queue: int = 1000
    """Messages held per peer and direction before a sender waits."""
    handshake_s: float = 10.0
    """A connection that has not proved the secret by then is dropped."""
    heartbeat_s: float = 5.0
    """On TCP, how often a silent peer is asked for a sign of life."""
    silence_s: float = 20.0
    """On TCP, a peer that gave no sign of life for so long is gone."""
    descriptors: int = 64
    """Descriptors under one token."""
    clients: int = 64
    """Connections that a descriptor server serves at once; the oldest gives way to a new one."""

    def __post_init__(self) -> None:
        for name in ("message_bytes", "queue", "handshake_s", "heartbeat_s", "silence_s", "clients"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive")
        if not 0 < self.descriptors <= DESCRIPTORS_PER_MESSAGE:
            raise ValueError(f"descriptors must be between 1 and {DESCRIPTORS_PER_MESSAGE}")

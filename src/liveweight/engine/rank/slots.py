"""What a rank remembers of its sequences: one slot each, with its pages, its length and the token to go on from.

Owns the arrays and how a step's rows become one row of tokens. Running the model over them is the step runner's (step_runner).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from liveweight.engine.serving.step_stream import Draw, Fill, Next

NO_DRAFT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of a step, laid out: tokens [start, end) of the batch, and the first position of them.

    `draws` says how many of its last tokens draw: none in the middle of a prompt, two with a draft. `following` is the token after
    it, where one is known.
    """

    slot: int
    start: int
    end: int
    position: int
    draws: int
    following: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """A step, laid out."""

    rows: tuple[Row, ...]
    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    starts: NDArray[np.int64]
    tables: NDArray[np.int32]


class SeenTokens:
    """The tokens of one sequence, each once, for its repetition penalty: of the prompt, also where its pages came from the prefix cache,
    and of the answer."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._known = set(tokens)
        self._count = len(self._known)
        self._ids = np.empty(max(64, 2 * self._count), dtype=np.int64)
        self._ids[: self._count] = sorted(self._known)

    @property
    def ids(self) -> NDArray[np.int64]:
        """In no order; a view that holds until the next `add`."""
        return self._ids[: self._count]

    def add(self, token: int) -> None:
        """One that was drawn and stays."""
        if token in self._known:
            return
        if self._count == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
        self._known.add(token)
        self._ids[self._count] = token
        self._count += 1


class Slots:
    """All slots of a rank. Used by the rank's main thread."""

    def __init__(self, count: int, *, context: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        pages = -(-context // block_tokens) + 1  # one more: room for a guess that is not taken
        self._tables = np.zeros((count, pages), dtype=np.int32)
        self._held = [0] * count
        self.length = [0] * count  # tokens whose keys and values are in the cache
        self.last = [0] * count
        self.draft = [NO_DRAFT] * count
        self.draws: list[Draw | None] = [None] * count
        self.seen: list[SeenTokens | None] = [None] * count  # only with a repetition penalty

    def lay(self, rows: Sequence[Fill | Next]) -> StepLayout:
        """The step's tokens in one row, in the order of its rows. Pages that come with a row are added to its slot."""
        laid: list[Row] = []
        tokens: list[int] = []
        for row in rows:
            start = len(tokens)
            self._add_pages(row)
            match row:
                case Fill(slot=slot, start=position, tokens=chunk, following=following):
                    tokens += chunk
                    self.length[slot] = position
                    draws = 1 if following is None else 0
                case Next(slot=slot):
                    position, following, draws = self.length[slot], None, 1
                    tokens.append(self.last[slot])
                    if self.draft[slot] != NO_DRAFT:
                        tokens.append(self.draft[slot])
                        draws = 2
            laid.append(
                Row(
                    slot=slot,
                    start=start,
                    end=len(tokens),
                    position=position,
                    draws=draws,
                    following=following,
                )
            )
        return self._arrays(laid, tokens)

    def _add_pages(self, row: Fill | Next) -> None:
        slot = row.slot
        if isinstance(row, Fill) and row.draw is not None:
            self._held[slot], self.draft[slot], self.draws[slot] = 0, NO_DRAFT, row.draw
            penalised = row.draw.repetition_penalty != 1.0
            self.seen[slot] = SeenTokens(row.draw.seen) if penalised else None
        if row.blocks:
            held = self._held[slot]
            self._tables[slot, held : held + len(row.blocks)] = row.blocks
            self._held[slot] = held + len(row.blocks)

    def _arrays(self, rows: list[Row], tokens: list[int]) -> StepLayout:
        starts = np.array([row.start for row in rows] + [len(tokens)], dtype=np.int64)
        positions = np.concatenate([np.arange(r.position, r.position + r.end - r.start) for r in rows])
        pages = max(self._held[row.slot] for row in rows)
        return StepLayout(
            rows=tuple(rows),
            tokens=np.array(tokens, dtype=np.int64),
            positions=positions.astype(np.int64, copy=False),
            starts=starts,
            tables=np.ascontiguousarray(self._tables[[row.slot for row in rows], :pages]),
        )

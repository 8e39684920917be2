"""The step runner: runs the model over a step's rows, draws tokens, and drafts the next ones.

A drawing row with a draft feeds two tokens: the last one and a guess of the next. The model's own choice after the last one is
compared with the guess; if they agree, the choice after the guess counts too. So the tokens are those of the model alone, and only
the time differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from liveweight.engine.models.forward import Batch
from liveweight.engine.rank.attention import AttentionPlan, PagedAttention
from liveweight.engine.rank.sampler import SampledToken, sample
from liveweight.engine.rank.slots import Row, Slots, StepLayout
from liveweight.engine.serving.step_stream import Draw, Drawn, Step, StepDone

if TYPE_CHECKING:
    import torch

    from liveweight.engine.models.model import Model


class StepRunner:
    """One rank's model, cache and slots. Used by the rank's main thread."""

    def __init__(
        self, model: Model, attention: PagedAttention, slots: Slots, *, weights: str, reports: bool
    ) -> None:
        self.weights = weights
        self._model, self._attention, self._slots, self._reports = model, attention, slots, reports

    def run(self, step: Step, send: Callable[[StepDone], None]) -> None:
        """Carry a step out. Sends the results as soon as they are there, then makes the draft."""
        import torch

        with torch.inference_mode():
            laid = self._slots.lay(step.rows)
            plan = AttentionPlan(
                row_starts=laid.starts,
                positions=laid.positions,
                tables=laid.tables,
                block_tokens=self._slots.block_tokens,
            )
            wants_routing = [self._wants_routing(row) for row in laid.rows]
            batch = Batch(
                tokens=torch.from_numpy(laid.tokens),
                positions=torch.from_numpy(laid.positions),
                attend=partial(self._attention.attend, plan),
                routing=[] if any(wants_routing) else None,
            )
            hidden = self._model.hidden(batch)
            choices = self._choose(laid, hidden)
            drawn = [self._settle(row, choices[row.slot]) for row in laid.rows]
            if batch.routing:
                drawn = _with_routing(laid.rows, drawn, wants_routing, batch.routing)
            send(StepDone(step.number, self.weights, tuple(drawn) if self._reports else ()))
            if self._model.has_draft:
                self._guess(laid, batch, hidden, choices)

    def _wants_routing(self, row: Row) -> bool:
        draw = self._slots.draws[row.slot]
        return draw is not None and draw.routing

    def _choose(self, laid: StepLayout, hidden: torch.Tensor) -> dict[int, list[SampledToken]]:
        """By slot: the choices after the row's drawing tokens."""
        at: list[int] = []
        positions: list[int] = []
        draws: list[Draw] = []
        seen: list[NDArray[np.int64] | None] = []
        for row in laid.rows:
            draw = self._slots.draws[row.slot]
            if draw is None:
                continue
            for index in range(row.end - row.draws, row.end):
                at.append(index)
                positions.append(row.position + index - row.start + 1)
                draws.append(draw)
            seen += self._seen(row)
        choices: dict[int, list[SampledToken]] = {row.slot: [] for row in laid.rows}
        if not at:
            return choices
        rows = hidden if len(at) == len(hidden) else hidden[at]
        chosen = iter(sample(self._model.logits(rows), draws, positions, seen))
        for row in laid.rows:
            choices[row.slot] = [next(chosen) for _ in range(row.draws)]
        return choices

    def _seen(self, row: Row) -> list[NDArray[np.int64] | None]:
        """The tokens before each of the row's choices. The choice after a guess counts only if the guess was right, so it has seen it."""
        known = self._slots.seen[row.slot]
        if known is None:
            return [None] * row.draws
        if row.draws < 2:
            return [known.ids] * row.draws
        return [known.ids, np.append(known.ids, self._slots.draft[row.slot])]

    def _settle(self, row: Row, choices: Sequence[SampledToken]) -> Drawn:
        """Take the row's tokens into its slot: all that were computed from tokens that stay."""
        slots, slot = self._slots, row.slot
        guessed = row.draws == 2
        stays = choices[:1] if guessed and choices[0].token != slots.draft[slot] else choices
        slots.length[slot] = row.position + row.end - row.start - (len(choices) - len(stays))
        if not stays:
            return Drawn()
        slots.last[slot] = stays[-1].token
        seen = slots.seen[slot]
        if seen is not None:
            for choice in stays:
                seen.add(choice.token)
        logprobs = tuple(choice.logprob for choice in stays if choice.logprob is not None)
        return Drawn(
            tokens=tuple(choice.token for choice in stays),
            logprobs=logprobs,
            top=tuple(choice.top for choice in stays) if logprobs else (),
            drafted=int(guessed),
        )

    def _guess(
        self, laid: StepLayout, batch: Batch, hidden: torch.Tensor, choices: dict[int, list[SampledToken]]
    ) -> None:
        """Run the draft layer over the same positions, each with the token after it, and keep its guess for drawing rows.

        (Of a page that two sequences share, the last position's draft keys may come from the other's next token: worse guesses at
        worst.)
        """
        import torch

        following = batch.tokens.roll(-1)
        at: list[int] = []
        slots: list[int] = []
        for row in laid.rows:
            after = [choice.token for choice in choices[row.slot]]
            if row.following is not None:
                after = [row.following]
            following[row.end - len(after) : row.end] = torch.tensor(after)
            if row.draws:
                at.append(row.start + self._slots.length[row.slot] - row.position - 1)
                slots.append(row.slot)
        ahead = Batch(tokens=following, positions=batch.positions, attend=batch.attend)
        drafted = self._model.draft(ahead, hidden)
        if at:
            guesses = self._model.draft_logits(drafted[at]).argmax(dim=-1).tolist()
            for slot, guess in zip(slots, guesses, strict=True):
                self._slots.draft[slot] = guess


def _with_routing(
    rows: Sequence[Row], drawn: Sequence[Drawn], wanted: Sequence[bool], experts: Sequence[torch.Tensor]
) -> list[Drawn]:
    """Add the experts of each row's tokens that stay, to the rows that want them."""
    import msgspec
    import torch

    table = torch.stack(list(experts), dim=1).to(torch.int16).numpy().astype("<u2")
    routed = []
    for row, result, wants in zip(rows, drawn, wanted, strict=True):
        end = row.end - max(0, row.draws - len(result.tokens))
        routing = table[row.start : end].tobytes() if wants else b""
        routed.append(msgspec.structs.replace(result, routing=routing))
    return routed

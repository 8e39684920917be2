"""What TRL's trainers call in place of their VLLMGeneration: `sync_weights()` and `generate()`, over a publisher and its engines.

Owns when weights are published, under which labels, and what every process of the trainer gets. How prompts reach engines is rollouts.py's.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import msgspec

from liveweight.api import Publisher
from liveweight.errors import LiveWeightError, TrainerRefused, WrongState
from liveweight.integrations.trl.completions import CompletionEndpoint, GroupAnswer, SamplingFields
from liveweight.integrations.trl.processes import TrainerProcesses, fault_at
from liveweight.integrations.trl.rollouts import AGAIN_S, RolloutBatch, groups_of
from liveweight.rounds.report import Report
from liveweight.spec.deadline import Deadline
from liveweight.spec.decoders import from_msgpack
from liveweight.spec.manifest import Version
from liveweight.wire.messages.values import Fault


class _Share(msgspec.Struct, frozen=True, kw_only=True):
    """The prompts of one process."""

    prompts: list[list[int]]
    images: bool


class _Rollouts(msgspec.Struct, frozen=True, kw_only=True):
    """The main process's answers to all processes, or why there are none."""

    completions: list[list[int]] = []
    logprobs: list[list[float]] = []
    fault: Fault | None = None


class EngineGeneration:
    """One trainer's generation. Every process of the trainer has one, and TRL makes the same calls on all of them.

    The weights are published before the first rollouts, and again before rollouts that follow an optimiser step or the beginning of a
    `train()`; not in between. The main process alone asks engines. If a call fails at one process, it raises at all of them.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        endpoints: Sequence[CompletionEndpoint],
        sampling: SamplingFields,
        make_publisher: Callable[[], Publisher | None],
        merge_adapters: bool,
        recover_s: float,
        answer_s: float,
    ) -> None:
        """`make_publisher` is called once, when weights are first published: None at a process that publishes nothing. `merge_adapters`:
        PEFT's adapters are merged into the base while it is published."""
        self._trainer, self._endpoints, self._sampling = trainer, endpoints, sampling
        self._make_publisher, self._merge_adapters = make_publisher, merge_adapters
        self._recover_s, self._answer_s = recover_s, answer_s
        self._processes = TrainerProcesses(trainer.accelerator)
        self.publisher: Publisher | None = None
        self.report: Report | None = None
        """Of the version that was published last; None before the first, and at processes that publish nothing."""
        self.resources = ExitStack()
        """What `close` releases. It does not refer to the trainer."""
        self._made = self._closed = False
        self._changed = True
        self._labels: Counter[int] = Counter()
        self._pause = threading.Event()

    def weights_changed(self) -> None:
        """Publish before the next rollouts. Called at every process."""
        self._changed = True

    def connect(self) -> None:
        """Make the publisher, which compares the trainer's tensors with those of the engines. Called at every process."""
        if self._made:
            return
        error: Exception | None = None
        try:
            self.publisher = self._make_publisher()
            if self.publisher is not None:
                self.resources.callback(self.publisher.close)
        except Exception as failed:  # of any kind: every process must hear of it
            error = failed
        self._processes.agree(error)
        self._made = True

    def sync_weights(self) -> None:
        """Publish the trainer's weights, if they changed since they were published. TRL calls it at every process.

        A round that failed and may succeed later is repeated for up to `recover_s`, so that engines and ranks that are being started
        again are taken along. Raises the last error otherwise.
        """
        if self._closed:
            raise WrongState("closed", "generating rollouts")
        if not self._changed:
            return
        with self._merged():
            self.connect()
            self._publish(self._next_label())
        self._changed = False
        if self.report is not None:
            self._log(self.report.metrics())

    def generate(
        self,
        prompts: list[list[int]],
        images: list[Any] | None,
        num_generations: int,
        profiler: AbstractContextManager[object] | None = None,
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], list[list[list[int]]]]:
        """Answers to this process's prompts, of the weights as they are now: prompts, completions, and of every token its logprob and its
        id, each in a list of one. TRL calls it at every process."""
        self.sync_weights()  # TRL compares step numbers, which begin anew with the second train()
        own = _Share(
            prompts=[list(map(int, one)) for one in prompts], images=images is not None and any(images)
        )
        shares = [from_msgpack(raw, _Share) for raw in self._processes.gather(msgspec.msgpack.encode(own))]
        answer = _Rollouts()
        if self._processes.is_main:
            try:
                with nullcontext() if profiler is None else profiler:
                    answer = self._ask(shares, num_generations)
            except Exception as error:  # of any kind: the other processes wait for it
                if self._processes.count > 1:
                    fault = _Rollouts(fault=fault_at(error, 0))
                    self._processes.broadcast(msgspec.msgpack.encode(fault))
                raise
        if self._processes.count > 1:
            answer = from_msgpack(self._processes.broadcast(msgspec.msgpack.encode(answer)), _Rollouts)
            if answer.fault is not None:
                raise answer.fault.to_error()
        before = sum(len(share.prompts) for share in shares[: self._processes.index])
        places = slice(before, before + len(prompts))
        completions, logprobs = answer.completions[places], answer.logprobs[places]
        return (
            prompts,
            completions,
            [[[one] for one in each] for each in logprobs],
            [[[token] for token in each] for each in completions],
        )

    def close(self) -> None:
        """Close the publisher. Rollouts are refused from now on. Any process may call it, once or twice."""
        self._closed = True
        self._pause.set()
        self.resources.close()

    def _publish(self, label: str) -> None:
        deadline = Deadline.after(self._recover_s)
        while True:
            error: Exception | None = None
            try:
                self.report = None if self.publisher is None else self.publisher.publish(label)
            except Exception as failed:  # of any kind: every process must hear of it
                error = failed
            if self._processes.agree(error, time_left=not deadline.over):
                return
            self._pause.wait(AGAIN_S)

    def _next_label(self) -> str:
        """`step_N`, which a second `train()` goes through once more: then `step_N_2`."""
        step = int(self._trainer.state.global_step)
        self._labels[step] += 1
        times = self._labels[step]
        return f"step_{step}" if times == 1 else f"step_{step}_{times}"

    @contextmanager
    def _merged(self) -> Iterator[None]:
        """Merge adapters into a sharded base for the length of the block; elsewhere the publisher merges on the way."""
        if not self._merge_adapters:
            yield
            return
        self._trainer.model.merge_adapter()
        try:
            yield
        finally:
            self._trainer.model.unmerge_adapter()

    def _ask(self, shares: list[_Share], num_generations: int) -> _Rollouts:
        """Ask for the answers to the prompts of all processes. In the main process."""
        if any(share.images for share in shares):
            raise TrainerRefused("prompts with images: engines take text only")
        report = self.report
        if report is None:
            raise WrongState("without a version that was published", "generating rollouts")
        groups = groups_of([prompt for share in shares for prompt in share.prompts], num_generations)
        batch = RolloutBatch(
            endpoints=self._endpoints,
            groups=groups,
            sampling=self._sampling,
            version=report.version,
            serving={place for place, one in enumerate(report.replicas) if one.committed or report.unchanged},
            recover=lambda: self._recover(report.version),
            recover_s=self._recover_s,
            answer_s=self._answer_s,
        )
        answers: list[GroupAnswer] = batch.run()
        self._log(batch.counts.metrics())
        return _Rollouts(
            completions=[one for answer in answers for one in answer.completions],
            logprobs=[one for answer in answers for one in answer.logprobs],
        )

    def _recover(self, version: Version) -> set[int]:
        """Bring engines that lost the version back to it. Returns the places of those that serve it now."""
        if self.publisher is None:
            return set()
        try:
            if self.report is None or self.report.offer == "frozen":
                self.publisher.catch_up()
            else:  # nothing holds the weights but the trainer
                self.publisher.publish(version.label)
        except LiveWeightError as error:
            if not error.retryable:
                raise
        fleet = self.publisher.fleet()
        return {
            place
            for place, one in enumerate(fleet.replicas)
            if one.serving == version and one.not_serving is None
        }

    def _log(self, metrics: dict[str, float]) -> None:
        """Among TRL's own metrics, which its next log averages."""
        mode = "train" if self._trainer.model.training else "eval"
        for name, value in metrics.items():
            self._trainer._metrics[mode][name].append(value)

"""One-shot sources: every version comes as an iterator of (name, tensor) that can be run once, in any order.

Owns the comparison of what comes with what must come: `require` says that, from the engines' manifest. Without engines, `learn` takes it
from the first pass. Where tensors are copied to is the freeze's (offers/freeze.py). A pass may be a collective of the trainer's ranks, so
each one is run to its end (gathering_source.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from liveweight.devices.cpu import allocate
from liveweight.errors import LiveWeightError, ManifestInvalid, ManifestMismatch, Refused, Unavailable
from liveweight.spec.dtype import CASTABLE, DType, castable
from liveweight.spec.layout import contiguous_strides, packed
from liveweight.spec.manifest import Manifest, TensorSpec
from liveweight.spec.tensor_names import clean, find_expected, without_data_parallel
from liveweight.trainer.sources.gathering_source import GatheringSource
from liveweight.trainer.sources.host_tensor import HostTensor
from liveweight.trainer.sources.stacked_experts import checkpoint_manifest, parts_of, views_of
from liveweight.trainer.sources.tensors import AnyTensor, copy_into, spec_of, without_gradients

NamedTensors: TypeAlias = "Iterable[tuple[str, AnyTensor]]"
"""What `publish(label, tensors=...)` takes."""


class OneShotSource(GatheringSource):
    """The source of a publisher without a model. `hand_over` gives it the iterator of the next version.

    Each tensor is read before the next one is asked for, and not kept: the iterator may reuse its memory.
    """

    def __init__(self) -> None:
        self._given: Iterator[tuple[str, AnyTensor]] = iter(())
        self._factory = lambda: self._given
        self._numbers: dict[str, int] = {}
        self.learned = False
        """Whether the next pass is the copies of the first one, which `learn` made."""

    def require(self, manifest: Manifest) -> None:
        """Set what every pass must bring: these tensors, each under one of its names or several, in dtypes that can be cast to these."""
        self._manifest = manifest.without_digests()
        self._numbers = {name: n for n, spec in enumerate(manifest) for name in spec.names}

    def hand_over(self, tensors: NamedTensors | None) -> None:
        """Let the next pass be that iterator. Refused if there is none."""
        if tensors is None:
            raise Refused(
                "this publisher has no model: publish and offer need tensors=, an iterator of (name, tensor)"
            )
        self._given = as_pass(tensors)
        self.learned = False

    def arrivals(self) -> Iterator[tuple[int, AnyTensor]]:
        """A pass: the number of each tensor in the manifest, and the tensor, as they come. A tied tensor may come once per name.

        ManifestMismatch names a tensor that is unexpected, has another shape or a dtype that cannot be cast, or is missing at the end.
        """
        came: dict[str, str] = {}
        for given, tensor in self._pairs():
            for name, part in self._expected_parts(given, tensor):
                if name in came:
                    raise ManifestInvalid(_twice(name, came[name], given))
                came[name] = given
                number = self._numbers.get(name)
                if number is None:
                    raise ManifestMismatch([f"{given} unexpected"])
                want, have = self._manifest.tensors[number], spec_of(given, part)
                if have.shape != want.shape or not castable(have.dtype, want.dtype):
                    raise ManifestMismatch([f"{name} expected {want.describe()}, offered {have.describe()}"])
                yield number, part
                del part  # the iterator may want its memory for the next one
            del tensor
        missing = [spec.name for spec in self._manifest if came.keys().isdisjoint(spec.names)]
        if missing:
            raise ManifestMismatch([f"{name} missing" for name in missing])

    def learn(self, dtype: DType | None) -> Manifest:
        """Make the first pass, where no engine says what must come: returns its tensors as a checkpoint has them, floats in `dtype` if it
        is given. They are copied to private memory, and the copies become the next pass, which gives each back as it goes on."""
        copies: dict[str, HostTensor] = {}
        originals: dict[str, str] = {}
        with without_gradients():
            for given, tensor in self._pairs():
                name = clean(given)
                if name in copies:
                    raise ManifestInvalid(_twice(name, originals[name], given))
                have = spec_of(given, tensor)
                cast = have.dtype if dtype is None or have.dtype not in CASTABLE else dtype
                copies[name] = _copied(TensorSpec(name=name, dtype=cast, shape=have.shape), tensor)
                originals[name] = given
                del tensor
        names = without_data_parallel(list(copies), None)
        learned = dict(zip(names, (copies.pop(name) for name in list(copies)), strict=True))
        specs = [TensorSpec(name=name, dtype=copy.dtype, shape=copy.shape) for name, copy in learned.items()]
        self.hand_over((name, learned.pop(name)) for name in names)
        self.learned = True
        return checkpoint_manifest(Manifest(tensors=tuple(specs)))

    def _pairs(self) -> Iterator[tuple[str, AnyTensor]]:
        """The pass as it comes. What the iterator raises comes out as Unavailable."""
        last = None
        try:
            for pair in self.tensors():
                last, tensor = _checked_pair(pair)
                del pair
                yield last, tensor
                del tensor
        except LiveWeightError:
            raise
        except Exception as error:
            where = "before its first tensor" if last is None else f"after {last}"
            raise Unavailable(f"the iterator failed {where}: {type(error).__name__}: {error}") from error

    def _expected_parts(self, given: str, tensor: AnyTensor) -> Iterator[tuple[str, AnyTensor]]:
        """The tensor under the name that is expected; of stacked experts that are expected one by one, the parts."""
        name = find_expected(given, self._numbers)
        if name not in self._numbers:
            stacked = spec_of(given, tensor)
            parts = parts_of(stacked)
            names = [find_expected(part.name, self._numbers) for part in parts]
            if parts and all(part in self._numbers for part in names):
                yield from zip(names, views_of(tensor, parts[0].shape[0]), strict=True)
                return
        yield name, tensor


def as_pass(tensors: NamedTensors) -> Iterator[tuple[str, AnyTensor]]:
    """An iterator over what `tensors=` was given. Refused for anything that cannot be iterated."""
    try:
        return iter(tensors)
    except TypeError:
        kind = type(tensors)
        raise Refused(
            f"tensors= is an iterator of (name, tensor), not {kind.__module__}.{kind.__qualname__}"
        ) from None


def _checked_pair(pair: object) -> tuple[str, AnyTensor]:
    if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
        raise ManifestInvalid(f"tensors= gives tuples of a name and a tensor, not {type(pair).__name__}")
    return pair


def _copied(spec: TensorSpec, tensor: AnyTensor) -> HostTensor:
    memory = allocate(spec.size_bytes, f"a copy of {spec.name}").memory
    copy_into(memory, packed([spec]).placements[0], spec, tensor)
    strides = tuple(stride // spec.dtype.size_bytes for stride in contiguous_strides(spec.shape, spec.dtype))
    return HostTensor(
        address=memory.address, dtype=spec.dtype, shape=spec.shape, strides=strides, owner=memory
    )


def _twice(name: str, first: str, second: str) -> str:
    if first == second:
        return f"the iterator gave {second} twice"
    return f"the iterator gave {first} and {second}, which are both {name} here"

"""A target of torch tensors on one device: live weights, their shadow, and the swap between them.

Owns the shadow's memory and where the tensors point. What the tensors declare is torch_layout's, how they are swapped is
swap's, when is worker/commit's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from liveweight.devices.device import CPU, Device, open_device
from liveweight.devices.kernels import Kernels
from liveweight.devices.memory import Memory
from liveweight.errors import LayoutInvalid, Refused, WrongState
from liveweight.spec.layout import Layout, Piece
from liveweight.worker.in_place_overwrite import InPlaceSettings
from liveweight.worker.targets.swap import CHUNK_BYTES, LINK_CHUNK_BYTES, ContentSwap, point
from liveweight.worker.targets.target import Target
from liveweight.worker.targets.torch_layout import Parameter, Parameters, device_of, gather, layout_of

if TYPE_CHECKING:
    import torch

ExchangeMode: TypeAlias = Literal["swap", "copy"]
"""How staged weights become live: `swap` lets the tensors point at the other memory; `copy` swaps contents, for targets whose
addresses somebody holds (graphs, views, registered memory)."""

ShadowPlace: TypeAlias = Literal["device", "host", "none"]
"""Where the shadow lies: beside the live weights, or in the host's memory, for a device that has no room for a second copy. A shadow on
the host is swapped by `copy`, chunk by chunk, and holds the undo afterwards. `none`: there is no shadow, and rounds are in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """One of the two memories of every parameter: as the kernels see it, and as tensors that keep it alive.

    `held` has the view of every tensor object, in order, `addresses` where it lies: a swap has nothing left to look up.
    """

    memories: tuple[Memory, ...]
    views: tuple[torch.Tensor, ...]
    held: tuple[torch.Tensor, ...]
    addresses: list[int]


class TensorTarget:
    """Tensors as a rank's weights; implements the port in worker/targets/target. The tensor objects stay the same, also across swaps.

    Tensors may be strided in any order, but have no gaps; tied ones (same memory, shape and strides) are one, and stay tied.
    All lie on one device: theirs, unless it is given, and then they must agree. `threads` and `kernels` are used by `copy` only.
    `home` is the device that the shadow lies on: what stages into it and digests it works there.
    """

    def __init__(
        self,
        parameters: Parameters,
        *,
        exchange: ExchangeMode = "swap",
        threads: int = 1,
        kernels: Kernels | None = None,
        device: Device | None = None,
        shadow: ShadowPlace = "device",
    ) -> None:
        _check_choice("exchange", exchange, get_args(ExchangeMode))
        _check_choice("shadow", shadow, get_args(ShadowPlace))
        self.device = open_device(device_of(parameters)) if device is None else device
        self._parameters = gather(parameters, self.device)
        self._layout = layout_of(self._parameters)
        self._mode: ExchangeMode = "copy" if shadow == "host" else exchange
        self._place, self._threads = shadow, threads
        self.home: Device = CPU if shadow == "host" else self.device
        self._kernels = self.device.choose().kernels if kernels is None else kernels
        self._holders = [tensor for parameter in self._parameters for tensor in parameter.tensors]
        self._sides: tuple[_Side, _Side | None] = (
            _side(self._parameters, _live_views(self._parameters)),
            None,
        )
        self._contents: ContentSwap | None = None

    @property
    def layout(self) -> Layout:
        """What the tensors hold, and where; memory i is parameter i."""
        return self._layout

    def live(self, tensors: Collection[str] | None = None) -> Sequence[Memory]:
        """The memory that the tensors read now. LayoutInvalid if one was moved behind the target's back since."""
        del tensors  # all of them are in memory
        live, _ = self._sides
        self._check_unmoved(live)
        return live.memories

    def shadow(self) -> Sequence[Memory]:
        """The other memory: allocated at first use, in one piece, with the padding of the live tensors; then kept.

        After a swap by `swap` it is the memory that the tensors had before, the caller's own the first time.
        Raises OutOfMemory, or LayoutInvalid if a tensor was moved behind the target's back since.
        """
        live, shadow = self._sides
        self._check_unmoved(live)
        if self._place == "none":
            raise WrongState("in place, without a shadow", "staging beside the live weights")
        if shadow is None:
            shadow = _side(self._parameters, self._new_views(live.views))
            self._contents = self._content_swap(live, shadow) if self._mode == "copy" else None
            self._sides = (live, shadow)
        return shadow.memories

    def _content_swap(self, live: _Side, shadow: _Side) -> ContentSwap:
        linked = self.home is not self.device and self.device is not CPU
        return ContentSwap(
            *(live.memories, shadow.memories),
            kernels=self._kernels,
            threads=1 if linked else self._threads,  # one thread fills the link, and needs one bounce buffer
            device=self.device,
            to_shadow=self.device.to_host() if linked else None,
            chunk_bytes=LINK_CHUNK_BYTES if linked else CHUNK_BYTES,
        )

    def _new_views(self, live: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """New memory of the same shapes and strides, aligned, with the padding that no round writes."""
        import torch

        allocate = self.device.allocate_host if self._place == "host" else self.device.allocate
        parts = allocate([parameter.size_bytes for parameter in self._parameters], "a shadow")
        views = []
        # An inference tensor would make the parameters it is given to inference tensors, too.
        with torch.inference_mode(False), torch.no_grad():
            for parameter, old, part in zip(self._parameters, live, parts, strict=True):
                view = part.view(old.dtype).as_strided(old.shape, old.stride())
                if parameter.padded:
                    view.copy_(old)
                views.append(view)
        self.device.synchronise()
        return views

    def keep(self, tensors: Collection[str]) -> None:
        """Copy what is live of these tensors into the shadow, with all that shares their memories: staging comes after it."""
        import torch

        live, shadow = self._sides
        if shadow is None:
            raise WrongState("without a shadow", "keeping tensors")
        wanted = {self._layout.specs()[name].name for name in tensors}
        memories = {p.memory for p in self._layout.placements if self._layout.specs()[p.name].name in wanted}
        with torch.inference_mode(False), torch.no_grad():
            for memory in sorted(memories):
                shadow.views[memory].copy_(live.views[memory])
        self.device.synchronise()

    def swap(self) -> None:
        """Swap live and shadow, all or nothing; its own inverse. Torn only if the way back from a failure fails too.

        What the device still computes with the live weights is waited for: the next round writes where they lie.
        """
        live, shadow = before = self._sides
        if shadow is None:
            raise WrongState("without a shadow", "a swap")
        self.device.synchronise()
        if self._contents is not None:
            self._contents.run()
            return
        try:
            point(self._holders, shadow.held, before=live.held)
            self._sides = (shadow, live)
        except BaseException:
            self._sides = before
            raise

    unread = 0
    """Live memory is what serves."""

    def read_back(self) -> None:
        """Live memory is what serves."""

    def idle(self) -> Sequence[Memory]:
        """The memory that is not live, if there is any by now: nothing is allocated for it."""
        return () if self._sides[1] is None else self._sides[1].memories

    def release_shadow(self) -> None:
        """Let go of the memory that is not live, and of what it holds: there is nothing to swap back to.

        After an odd number of swaps that is the memory the tensors had at first; the target's allocation is live then, and
        lives as long as the tensors. Memory that somebody else holds (a Reading, a bound digest, a view) is freed when they let go.
        """
        self._contents = None
        self._sides = (self._sides[0], None)

    def _check_unmoved(self, live: _Side) -> None:
        if [holder.data_ptr() for holder in self._holders] == live.addresses:
            return
        moved = {
            id(holder)
            for holder, view in zip(self._holders, live.held, strict=True)
            if holder.data_ptr() != view.data_ptr()
        }
        names = [p.names[0] for p in self._parameters if not moved.isdisjoint(map(id, p.tensors))]
        if names:
            raise LayoutInvalid(f"memory replaced by somebody else; make a new target: {', '.join(names)}")


def module_target(
    module: torch.nn.Module,
    pieces: Mapping[str, Sequence[Piece]] | None = None,
    *,
    exchange: ExchangeMode = "swap",
    threads: int = 1,
    kernels: Kernels | None = None,
    device: Device | None = None,
    shadow: ShadowPlace = "device",
) -> TensorTarget:
    """A module's parameters and persistent buffers as a target. `pieces` says what a parameter holds, if not itself, whole.

    No pieces (an empty sequence) leave a parameter out of rounds. LayoutInvalid for pieces of a name that the module lacks.
    """
    saved = module.state_dict(keep_vars=True)
    named: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    named |= {name: b for name, b in module.named_buffers(remove_duplicate=False) if name in saved}
    unknown = sorted(set(pieces or {}) - set(named))
    if unknown:
        raise LayoutInvalid(f"pieces for what the module does not have: {', '.join(unknown)}")
    given = {
        name: (tensor, pieces[name]) if pieces and name in pieces else tensor
        for name, tensor in named.items()
    }
    return TensorTarget(
        given, exchange=exchange, threads=threads, kernels=kernels, device=device, shadow=shadow
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedTarget:
    """A target, the device that its live weights are on, and the one that its shadow is on, where sources are read."""

    target: Target
    device: Device
    home: Device
    shadow: ShadowPlace

    def in_place(self, chunk_bytes: int) -> InPlaceSettings | None:
        """How a target without a shadow is overwritten."""
        if self.shadow != "none":
            return None
        return InPlaceSettings(chunk_bytes=chunk_bytes, synchronise=self.device.synchronise)


def as_target(
    given: torch.nn.Module | Parameters | Target,
    pieces: Mapping[str, Sequence[Piece]] | None,
    *,
    exchange: ExchangeMode,
    shadow: ShadowPlace,
    device: Device | None,
) -> PlacedTarget:
    """A target from a module, from tensors by name, or one that is given; of that, both sides are on the device given, or the host."""
    import torch

    if isinstance(given, torch.nn.Module):
        built = module_target(given, pieces, exchange=exchange, device=device, shadow=shadow)
    elif isinstance(given, Mapping):
        built = TensorTarget(given, exchange=exchange, device=device, shadow=shadow)
    elif not callable(getattr(given, "swap", None)):
        raise Refused(
            "a receiver's weights are a torch module, a mapping of names to tensors, or a Target, "
            f"not {type(given).__module__}.{type(given).__qualname__}"
        )
    elif shadow == "host":
        raise ValueError(
            f"a Target of one's own decides itself where its shadow lies, and {shadow} was asked for"
        )
    else:
        home = CPU if device is None else device
        return PlacedTarget(target=given, device=home, home=home, shadow=shadow)
    return PlacedTarget(target=built, device=built.device, home=built.home, shadow=shadow)


def _live_views(parameters: Sequence[Parameter]) -> list[torch.Tensor]:
    """Where the tensors lie now; the views keep that memory when the tensors point elsewhere."""
    return [parameter.tensor.data for parameter in parameters]


def _check_choice(what: str, given: str, known: Sequence[str]) -> None:
    if given not in known:
        raise ValueError(f"{what} {given!r} is none of {', '.join(known)}")


def _side(parameters: Sequence[Parameter], views: Sequence[torch.Tensor]) -> _Side:
    held = [view for parameter, view in zip(parameters, views, strict=True) for _ in parameter.tensors]
    return _Side(
        memories=tuple(map(Memory.of_view, views)),
        views=tuple(views),
        held=tuple(held),
        addresses=[view.data_ptr() for view in held],
    )

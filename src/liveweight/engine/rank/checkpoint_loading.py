"""Checkpoint loading at start: fills a rank's parameters from a checkpoint directory, as their declarations say (models/declare).

Names, dtypes and shapes are compared in both directions before a byte is read; then only the slices that the rank holds are read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from liveweight.checkpoint import Entry, checkpoint_entries, opened
from liveweight.engine.rank.hooks import hooks_of
from liveweight.errors import NAMES_SHOWN, CheckpointInvalid, LayoutInvalid, ManifestInvalid
from liveweight.spec.dtype import DType
from liveweight.spec.layout import Piece
from liveweight.spec.manifest import TensorSpec

if TYPE_CHECKING:
    from liveweight.engine.models.model import Model
    from liveweight.worker.commit import Hook

READABLE = (DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fill:
    """One slice of a file's tensor, and the part of a parameter that it fills."""

    entry: Entry
    piece: Piece
    into: torch.Tensor


def load(model: Model, directory: Path, hooks: Sequence[Hook] | None = None) -> None:
    """Fill this rank's parameters, cast to their dtype, and run the hooks: these, or, without any, the engine's own.

    CheckpointInvalid names the file, or the tensors, that do not fit. Nothing is written before the whole directory was found to fit. A
    file that fails while it is read leaves the model half filled.
    """
    try:
        entries = {entry.key: entry for entry in checkpoint_entries(directory)}
        _check(directory, model, entries)
        _fill(_fills(model, entries))
    except ManifestInvalid as error:
        raise CheckpointInvalid(" ".join(str(error).split())) from error
    for hook in hooks_of(model) if hooks is None else hooks:
        hook()


def _check(directory: Path, model: Model, entries: Mapping[str, Entry]) -> None:
    """Both directions, over the tensors of all ranks: each rank finds the same."""
    specs = {spec.name: spec for one in model.declarations().values() for spec in one.tensors}
    problems = []
    for spec in specs.values():
        entry = _entry(spec, entries)
        if entry is None:
            problems.append(f"{spec.name} missing")
        elif entry.shape != spec.shape:
            problems.append(f"{entry.key} has shape {list(entry.shape)}, not {list(spec.shape)}")
        elif entry.dtype not in READABLE:
            problems.append(f"{entry.key} is {entry.dtype.value}, which is not supported")
    known = {name for spec in specs.values() for name in spec.names}
    unused = _unused(model)
    problems += [
        f"{name} unexpected" for name in entries if name not in known and not name.startswith(unused)
    ]
    if problems:
        more = len(problems) - NAMES_SHOWN
        shown = ", ".join(problems[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
        raise CheckpointInvalid(f"{directory}: {shown}")


def _unused(model: Model) -> tuple[str, ...]:
    """What a checkpoint may have and the model does not need: the MTP layers, where it drafts nothing."""
    if model.has_draft:
        return ()
    first = model.spec.layers
    return tuple(f"model.layers.{first + number}." for number in range(max(1, model.spec.draft_layers)))


def _entry(spec: TensorSpec, entries: Mapping[str, Entry]) -> Entry | None:
    """Where a tensor is, under its name or, tied, under another."""
    return next((entries[name] for name in spec.names if name in entries), None)


def _fills(model: Model, entries: Mapping[str, Entry]) -> list[_Fill]:
    """All that is to be read, file by file."""
    fills = []
    parameters = dict(model.named_parameters())
    for name, declaration in model.declarations().items():
        parameter = parameters[name]
        if tuple(parameter.shape) != declaration.shape:
            shapes = f"{tuple(parameter.shape)}, declared as {declaration.shape}"
            raise LayoutInvalid(f"{name} has shape {shapes}")
        for piece in declaration.pieces:
            entry = _entry(piece.tensor, entries)
            if entry is not None:
                fills.append(_Fill(entry=entry, piece=piece, into=_destination(parameter.data, piece)))
    return sorted(fills, key=lambda fill: (fill.entry.file, fill.entry.key))


def _destination(parameter: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The part of a parameter that a piece fills, in the tensor's own order of dimensions."""
    dims = parameter.dim()
    axes = piece.axes or tuple(range(dims - len(piece.region), dims))
    spans = dict(zip(axes, piece.region, strict=True))
    at = piece.at or (0,) * dims
    index = [
        slice(at[axis], at[axis] + spans[axis].count) if axis in spans else at[axis] for axis in range(dims)
    ]
    kept = sorted(axes)
    return parameter[tuple(index)].permute([kept.index(axis) for axis in axes])


def _fill(fills: list[_Fill]) -> None:
    with torch.no_grad():
        for path, group in itertools.groupby(fills, key=lambda fill: fill.entry.file):
            with opened(path) as file:
                for fill in group:
                    part = file.get_slice(fill.entry.key)
                    fill.into.copy_(part[tuple(_slices(fill.piece))][tuple(_steps(fill.piece))])


def _slices(piece: Piece) -> Iterator[slice]:
    return (slice(span.start, span.last + 1) for span in piece.region)


def _steps(piece: Piece) -> Iterator[slice]:
    return (slice(None, None, span.step) for span in piece.region)

"""`liveweight verify`: whether engines hold exactly the weights of a checkpoint directory now."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from liveweight.cli.commands.operate import Timeout, Urls, label_of
from liveweight.cli.commands.push import Source
from liveweight.cli.exit_codes import DIFFERENT, FAILED
from liveweight.cli.failures import error_line
from liveweight.cli.progress import SEPARATOR
from liveweight.cli.secrets import ControlKey, ControlKeyFile, key_of
from liveweight.errors import NAMES_SHOWN, DigestMismatch, LiveWeightError, ManifestMismatch
from liveweight.server.client import EngineClient

if TYPE_CHECKING:
    from liveweight.spec.manifest import Manifest, TensorSpec

CHECKED_BY_RANK = 100

Names = Annotated[
    list[str] | None, typer.Option("--name", help="Only this tensor; may be given more than once.")
]


def verify(
    directory: Source,
    urls: Urls,
    name: Names = None,
    timeout: Timeout = 60.0,
    control_key: ControlKey = None,
    control_key_file: ControlKeyFile = None,
) -> None:
    """Compare what engines hold now, digested in the memory of all their ranks, with a checkpoint's weights.

    Exit code 0: all hold exactly these. 3: one holds others. 1: it could not be learned.

    For example: liveweight verify ./step_100 http://127.0.0.1:8000
    """
    key = key_of(control_key, control_key_file, "control key")
    local = _Local(directory, name)
    differ, errors = False, list[LiveWeightError]()
    for url in urls:
        prefix = "" if len(urls) == 1 else f"{url}: "
        try:
            differs, text = _compare(EngineClient(url, key), local, timeout)
        except LiveWeightError as error:
            errors.append(error)
            print(f"{prefix}{error_line(error)}", file=sys.stderr)
        else:
            differ |= differs
            print(f"{prefix}{text}", file=sys.stderr if differs else sys.stdout)
    if errors:
        raise typer.Exit(FAILED) from errors[0]
    if differ:
        raise typer.Exit(DIFFERENT)


class _Local:
    """A checkpoint's digests, computed once for all engines that hold it in the same dtypes."""

    def __init__(self, directory: Path, names: Sequence[str] | None) -> None:
        self._directory, self.names = directory, names
        self._known: dict[bytes, Manifest] = {}

    def digests(self, held: Manifest) -> Manifest:
        """The checkpoint's tensors, with digests, in the dtypes that the engine holds."""
        from liveweight.devices.kernels import choose_kernels
        from liveweight.trainer.sources.in_memory import as_source
        from liveweight.trainer.sources.source_digests import digest_source

        form = held.names_digest()
        if form not in self._known:
            self._known[form] = digest_source(as_source(self._directory), held, choose_kernels(), self.names)
        return self._known[form]


def _compare(client: EngineClient, local: _Local, timeout_s: float) -> tuple[bool, str]:
    """Compare one engine. Returns whether it differs, and the text to print."""
    answer = client.verify({"digests": True, "names": local.names}, timeout_s)
    held = _manifest(answer["digests"])
    given = local.digests(held).by_name()
    own = {spec.name: next((given[name] for name in spec.names if name in given), None) for spec in held}
    serving = f"Serving {label_of(answer['version'])}."
    misfits = [text for spec in held if (text := _misfit(spec, own[spec.name])) is not None]
    if misfits:
        return True, f"{ManifestMismatch.code} {ManifestMismatch(misfits)}. {serving}"
    expected = {name: spec for name, spec in own.items() if spec is not None}
    different = [spec.name for spec in held if spec.digest != expected[spec.name].digest]
    if different:
        checked = {expected[name].name: expected[name] for name in different[:CHECKED_BY_RANK]}
        ranks = _ranks(
            client.verify({"manifest": {name: _form(spec) for name, spec in checked.items()}}, timeout_s)
        )
        return True, f"{DigestMismatch.code} {_differs(different, ranks)}. {serving}"
    count = len(held.tensors)
    digest = "" if local.names else f"{SEPARATOR}digest {_digest(expected.values())}"
    return False, f"verified {count}/{count} tensors{digest}{SEPARATOR}serving {label_of(answer['version'])}"


def _manifest(listed: Sequence[Mapping[str, Any]]) -> Manifest:
    from liveweight.spec.dtype import DType
    from liveweight.spec.manifest import Manifest, TensorSpec

    return Manifest(
        tensors=tuple(
            TensorSpec(
                name=one["name"],
                dtype=DType(one["dtype"]),
                shape=tuple(one["shape"]),
                aliases=tuple(one["aliases"]),
                digest=one["digest"],
            )
            for one in listed
        )
    )


def _misfit(held: TensorSpec, given: TensorSpec | None) -> str | None:
    """Why a tensor of the engine has no counterpart in the checkpoint."""
    if given is None:
        return f"{held.name} missing in the checkpoint"
    if (held.dtype, held.shape) != (given.dtype, given.shape):
        return f"{held.name} is {held.describe()} in the engine, {given.describe()} in the checkpoint"
    return None


def _form(spec: TensorSpec) -> dict[str, object]:
    return {"dtype": spec.dtype.value, "shape": spec.shape, "digest": spec.digest}


def _ranks(answer: Mapping[str, Any]) -> list[int]:
    """All ranks that differ."""
    return sorted({rank for one in answer["mismatches"] for rank in one["ranks"]})


def _differs(names: Sequence[str], ranks: Sequence[int]) -> str:
    more = len(names) - NAMES_SHOWN
    listed = ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
    where = f" on rank {', '.join(map(str, ranks))}" if ranks else ""
    return f"{listed} {'differs' if len(names) == 1 else 'differ'}{where}"


def _digest(specs: Iterable[TensorSpec]) -> str | None:
    """The digest of the whole manifest, under the checkpoint's tensor names."""
    from liveweight.spec.manifest import Manifest

    return Manifest(tensors=tuple({spec.name: spec for spec in specs}.values())).digest()

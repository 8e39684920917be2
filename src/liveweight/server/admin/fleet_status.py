"""Fleet status: which of several engines are behind, from their `GET /v1/weights` answers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from liveweight.spec.manifest import Version
from liveweight.spec.version_age import newest


def with_behind(statuses: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every answer with `behind`: the label of the fleet's newest version, where the engine does not serve that; else None.

    If an engine came back with an older version than it had, and no engine serves a newer one, `behind` is the version that it had.
    """
    served = [(_version(one), float(one.get("serving_s") or 0.0)) for one in statuses]
    latest = newest([(version, age_s) for version, age_s in served if version is not None])
    return [
        {**one, "behind": _behind(one, version, latest)}
        for one, (version, _) in zip(statuses, served, strict=True)
    ]


def _behind(status: Mapping[str, Any], version: Version | None, latest: Version | None) -> str | int | None:
    if "error" in status:
        return None
    if latest is not None and version != latest:
        return latest.label
    missed = (status.get("recovery") or {}).get("behind")
    return None if missed is None else missed["label"]


def _version(status: Mapping[str, Any]) -> Version | None:
    version = status.get("version")
    if version is None:
        return None
    return Version(
        run=version["run"], label=version["label"], digest=version["digest"], number=version.get("number")
    )

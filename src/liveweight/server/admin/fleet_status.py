"""Who of several engines is behind, from what each says of itself (`GET /v1/weights`). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from liveweight.spec.manifest import Version
from liveweight.spec.version_age import newest


def with_behind(said: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every answer with `behind`: the label of the fleet's newest version, where the engine does not serve that; else None.

    Where an engine came back with an older version than it had, and nobody serves a newer one, it is that one which it is behind.
    """
    served = [(_version(one), float(one.get("serving_s") or 0.0)) for one in said]
    latest = newest([(version, age_s) for version, age_s in served if version is not None])
    return [
        {**one, "behind": _behind(one, version, latest)}
        for one, (version, _) in zip(said, served, strict=True)
    ]


def _behind(said: Mapping[str, Any], version: Version | None, latest: Version | None) -> str | int | None:
    if "error" in said:
        return None
    if latest is not None and version != latest:
        return latest.label
    missed = (said.get("recovery") or {}).get("behind")
    return None if missed is None else missed["label"]


def _version(said: Mapping[str, Any]) -> Version | None:
    told = said.get("version")
    return None if told is None else Version(run=told["run"], label=told["label"], digest=told["digest"])

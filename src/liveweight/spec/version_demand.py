"""What a request may demand of the version that answers it. Pure; engines and vLLM's middleware check it alike."""

from __future__ import annotations

from typing import Annotated

import msgspec

from liveweight.errors import VersionNotServed
from liveweight.spec.manifest import Version


class VersionDemand(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`min`: a version with this number or a higher one; `exact`: the version of this label, compared as text; `run`: of this run. All that
    are given must be met; ValueError without `min` and `exact`."""

    min: Annotated[int, msgspec.Meta(ge=0)] | None = None
    exact: str | int | None = None
    run: str | None = None

    def __post_init__(self) -> None:
        if self.min is None and self.exact is None:
            raise ValueError("`min` or `exact` must be given")

    def met_by(self, serving: Version | None) -> bool:
        """Whether that version meets all of it. One without a number meets no `min`."""
        if serving is None or (self.run is not None and self.run != serving.run):
            return False
        if self.min is not None and (serving.number is None or serving.number < self.min):
            return False
        return self.exact is None or str(self.exact) == str(serving.label)

    def check(self, serving: Version | None) -> None:
        """Raise VersionNotServed, with the demand and the version, if it is not met."""
        if not self.met_by(serving):
            raise self.refusal(serving)

    def refusal(self, serving: Version | None) -> VersionNotServed:
        """The error that says what was demanded and what serves."""
        given = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        return VersionNotServed(given, None if serving is None else msgspec.structs.asdict(serving))

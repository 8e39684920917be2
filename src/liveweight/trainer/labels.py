"""Labels: what each label of one run stands for, as far as its publisher knows.

A label is bound when an engine serves the version, or was granted a read lease on it: what a reader makes of it, the source does not learn.
A round that failed, and an offer that nobody read, bind nothing: the label may be used again, for the same content or for other.
Replicas keep the same record by the same rule (rounds/leader/membership).
"""

from __future__ import annotations

from collections import OrderedDict

from liveweight.errors import VersionConflict
from liveweight.spec.manifest import Version

REMEMBERED = 65536


class Labels:
    """The labels of one run. Checked before a round, bound after it."""

    def __init__(self) -> None:
        self._digests: OrderedDict[str, str] = OrderedDict()

    def check(self, version: Version) -> None:
        """Refuse a label that stands for other content. Content that is not known yet is never refused."""
        known = self._digests.get(str(version))
        if known is not None and version.digest not in (None, known):
            raise VersionConflict(f"{version} was published before in this run, with other content")

    def bind(self, version: Version) -> None:
        """An engine serves it, or may: from now on the label stands for that content."""
        if version.digest is None:
            return
        self._digests[str(version)] = version.digest
        while len(self._digests) > REMEMBERED:
            self._digests.popitem(last=False)

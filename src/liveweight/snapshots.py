"""`lw.snapshots`: a version's weights in files, saved and restored by a program of yours. docs/snapshots.md shows how.

Owns nothing: the public home of names that live below transports/snapshot.
"""

from __future__ import annotations

from liveweight.spec.deadline import Deadline
from liveweight.transports.snapshot.disk.store import Store
from liveweight.transports.snapshot.disk.writer import Image, RankWriter
from liveweight.transports.snapshot.restore import restore
from liveweight.transports.snapshot.save import Background, save

__all__ = ["Background", "Deadline", "Image", "RankWriter", "Store", "restore", "save"]

"""Tables of integers: the form of plans that kernels execute, one row for each piece of work."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Table: TypeAlias = npt.NDArray[np.int64]

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32] | npt.NDArray[np.int16]

def store(
    keys: Floats,
    values: Floats,
    starts: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    tables: npt.NDArray[np.int32],
    key: Floats,
    value: Floats,
    /,
) -> None: ...
def attend(
    keys: Floats,
    values: Floats,
    starts: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    tables: npt.NDArray[np.int32],
    query: Floats,
    out: Floats,
    portable: bool = False,
    /,
) -> None: ...
def simd(dim: int, /) -> str: ...

import numpy as np
import numpy.typing as npt

def copy(table: npt.NDArray[np.int64], first: int, last: int, portable: bool = False, /) -> None: ...
def digest(
    table: npt.NDArray[np.int64],
    first: int,
    last: int,
    lanes: npt.NDArray[np.uint32],
    portable: bool = False,
    /,
) -> None: ...
def freeze(
    table: npt.NDArray[np.int64],
    first: int,
    last: int,
    lanes: npt.NDArray[np.uint32] | None,
    portable: bool = False,
    /,
) -> None: ...
def simd() -> str: ...

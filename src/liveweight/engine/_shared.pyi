from typing import Any

def add(
    segment: Any, capacity: int, rank: int, size: int, turn: int, part: Any, half: bool, timeout_s: float, /
) -> int | None: ...
def join(
    segment: Any,
    capacity: int,
    rank: int,
    size: int,
    turn: int,
    part: Any,
    into: Any,
    row: int,
    timeout_s: float,
    /,
) -> int | None: ...

"""The dtypes that a weight may have. One table; every other spelling is derived from it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Facts:
    size_bytes: int
    safetensors: str


class DType(enum.Enum):
    """A dtype by its name, which torch and the wire share."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8_E4M3FN = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"
    INT64 = "int64"
    INT32 = "int32"
    INT16 = "int16"
    INT8 = "int8"
    UINT64 = "uint64"
    UINT32 = "uint32"
    UINT16 = "uint16"
    UINT8 = "uint8"
    BOOL = "bool"

    @property
    def size_bytes(self) -> int:
        """Bytes of one element."""
        return _FACTS[self].size_bytes

    @property
    def unit_bytes(self) -> int:
        """Bytes of one digest unit: 2, or 1 for one-byte dtypes."""
        return min(2, self.size_bytes)

    @property
    def units(self) -> int:
        """Digest units of one element."""
        return self.size_bytes // self.unit_bytes

    @property
    def safetensors(self) -> str:
        """The name that safetensors files use."""
        return _FACTS[self].safetensors

    @classmethod
    def from_safetensors(cls, name: str) -> DType:
        """The dtype that safetensors calls so; ValueError for any other."""
        try:
            return _BY_SAFETENSORS[name]
        except KeyError:
            raise ValueError(f"safetensors dtype {name} is not supported") from None


_FACTS = {
    DType.FLOAT64: _Facts(8, "F64"),
    DType.FLOAT32: _Facts(4, "F32"),
    DType.FLOAT16: _Facts(2, "F16"),
    DType.BFLOAT16: _Facts(2, "BF16"),
    DType.FLOAT8_E4M3FN: _Facts(1, "F8_E4M3"),
    DType.FLOAT8_E5M2: _Facts(1, "F8_E5M2"),
    DType.INT64: _Facts(8, "I64"),
    DType.INT32: _Facts(4, "I32"),
    DType.INT16: _Facts(2, "I16"),
    DType.INT8: _Facts(1, "I8"),
    DType.UINT64: _Facts(8, "U64"),
    DType.UINT32: _Facts(4, "U32"),
    DType.UINT16: _Facts(2, "U16"),
    DType.UINT8: _Facts(1, "U8"),
    DType.BOOL: _Facts(1, "BOOL"),
}
_BY_SAFETENSORS = {facts.safetensors: dtype for dtype, facts in _FACTS.items()}


CASTABLE = frozenset({DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16})
"""Dtypes that a freeze casts between. An eight-bit float means nothing without its scale: no cast gives or takes one."""


def castable(have: DType, want: DType) -> bool:
    """Whether a freeze makes one of the other: they are the same, or floats that it casts between."""
    return have is want or {have, want} <= CASTABLE

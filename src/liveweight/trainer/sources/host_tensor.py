"""Tensors in the host's memory that are not torch's: where they lie, their dtype, shape and strides.

Sources of other frameworks give them out. Has the few methods of torch's tensors that offers need, so that a trainer without torch can
publish. Nothing is copied but by `cast`, for dtypes that no kernel casts between.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from liveweight.devices.numpy_kernels import bfloat16_bits
from liveweight.spec.dtype import DType
from liveweight.spec.layout import contiguous_strides

_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostTensor:
    """`strides` count elements. `owner` is whatever keeps the bytes where they are."""

    address: int
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    owner: object

    device: ClassVar[str] = "cpu"
    is_cpu: ClassVar[bool] = True

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.dtype.size_bytes

    def data_ptr(self) -> int:
        """Where its first element lies."""
        return self.address

    def stride(self) -> tuple[int, ...]:
        """From one element to the next, in every dimension, in elements."""
        return self.strides

    def numel(self) -> int:
        """How many elements it has."""
        return int(np.prod(self.shape, dtype=np.int64))

    def is_contiguous(self) -> bool:
        """Whether its elements lie in a row, in order."""
        expected = contiguous_strides(self.shape, self.dtype)
        return all(
            size == 1 or step * self.itemsize == wanted
            for size, step, wanted in zip(self.shape, self.strides, expected, strict=True)
        )

    def is_neg(self) -> bool:
        """Never: its bytes are its values."""
        return False

    def transposed(self) -> HostTensor:
        """The same bytes with the last two dimensions exchanged."""
        *above, rows, columns = self.shape
        *outer, row, column = self.strides
        return replace(self, shape=(*above, columns, rows), strides=(*outer, column, row))

    def parts(self, rows: int) -> Iterator[HostTensor]:
        """Of a stack of matrices, so many rows at a time, matrix by matrix."""
        matrices, height, width = self.shape
        for matrix in range(matrices):
            for top in range(0, height, rows):
                start = matrix * self.strides[0] + top * self.strides[1]
                yield replace(
                    self,
                    address=self.address + start * self.itemsize,
                    shape=(rows, width),
                    strides=self.strides[1:],
                )

    def cast(self, dtype: DType) -> npt.NDArray[np.uint8]:
        """Its values in that dtype, rounded to the nearest, ties to even: bytes in a row, in memory of their own."""
        bits = np.asarray(_Interface(self))
        if dtype is not self.dtype:
            bits = _cast(bits, self.dtype, dtype)
        return np.ascontiguousarray(bits).reshape(-1).view(np.uint8).copy()


class _Interface:
    """A tensor with NumPy's array interface, as bits; the array keeps this object, and this object the owner."""

    def __init__(self, tensor: HostTensor) -> None:
        self.owner = tensor.owner
        self.__array_interface__ = {
            "version": 3,
            "typestr": np.dtype(_BITS[tensor.itemsize]).str,
            "shape": tensor.shape,
            "strides": tuple(step * tensor.itemsize for step in tensor.strides),
            "data": (tensor.address, True),
        }


def _values(bits: npt.NDArray[Any], dtype: DType) -> npt.NDArray[Any]:
    if dtype is DType.BFLOAT16:
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.view(dtype.value)


def _cast(bits: npt.NDArray[Any], have: DType, want: DType) -> npt.NDArray[Any]:
    """Between floats. Those of 16 bits are made of float32, as torch makes them."""
    values = _values(np.ascontiguousarray(bits), have)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if want is DType.BFLOAT16:
            return bfloat16_bits(values.astype(np.float32).view(np.uint32)).astype(np.uint16)
        return (values.astype(np.float32) if want is DType.FLOAT16 else values).astype(want.value)

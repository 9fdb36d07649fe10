"""What Peerlane needs to know about arrays and tensors of other libraries."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

from peerlane import _native
from peerlane._errors import InvalidArgument

CPU = (1, 0)
_CUDA, _ROCM = 2, 10

_DTYPES = {
    "uint8": "u8", "uint16": "u16", "uint32": "u32", "uint64": "u64",
    "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64",
    "float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64",
    "float8_e4m3fn": "f8e4m3", "float8_e5m2": "f8e5m2",
}  # fmt: skip
ITEMSIZE = {
    "u8": 1, "u16": 2, "u32": 4, "u64": 8, "i8": 1, "i16": 2, "i32": 4, "i64": 8,
    "f8e4m3": 1, "f8e5m2": 1, "f16": 2, "bf16": 2, "f32": 4, "f64": 8,
}  # fmt: skip
# The formats of the buffer protocol.
_FORMATS = {"b": "i8", "h": "i16", "i": "i32", "l": "i64", "q": "i64", "B": "u8", "c": "u8", "?": "u8", "H": "u16",
            "I": "u32", "L": "u64", "Q": "u64", "e": "f16", "f": "f32", "d": "f64"}  # fmt: skip


def dtype_name(dtype: Any) -> str:
    """Returns Peerlane's name of a type of NumPy, PyTorch or Peerlane.

    Types that only move, such as complex numbers and booleans, are bytes: "u8".
    """
    if isinstance(dtype, str) and dtype in ITEMSIZE:
        return dtype
    name = getattr(dtype, "__name__", None) if isinstance(dtype, type) else getattr(dtype, "name", None)
    name = str(name or dtype).removeprefix("torch.").removeprefix("<class '").removesuffix("'>")
    return _DTYPES.get(name, "u8")


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """The memory of an array."""

    address: int
    nbytes: int
    dtype: str
    device: tuple[int, int]
    owner: Any
    is_readonly: bool = False

    @property
    def count(self) -> int:
        """The number of elements."""
        return self.nbytes // ITEMSIZE[self.dtype]


def view(name: str, array: Any) -> View:
    """Returns the memory of a contiguous array.

    Accepts tensors of PyTorch, objects with `__dlpack__`, and objects with the buffer protocol.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _view_of_tensor(torch, name, array)
    if isinstance(array, _native.Memory):
        return View(array.address, array.nbytes, array.dtype, tuple(array.device), array)
    if hasattr(type(array), "__array_interface__"):  # NumPy, whose types of extensions have no buffer
        if not array.flags.c_contiguous:
            raise InvalidArgument(_not_contiguous(name, array.shape, array.strides))
        address, is_readonly = array.__array_interface__["data"]
        return View(address, array.nbytes, dtype_name(array.dtype), CPU, array, is_readonly)
    if hasattr(array, "__dlpack__"):
        address, nbytes, dtype, device, keep = _native.from_dlpack(name, array)
        return View(address, nbytes, dtype or "u8", device, keep)
    try:
        buffer = memoryview(array)
    except TypeError:
        text = f"{name} is a {type(array).__name__}, expected a tensor, or an object with `__dlpack__` or the buffer protocol"
        raise InvalidArgument(text) from None
    if not buffer.c_contiguous:
        raise InvalidArgument(_not_contiguous(name, buffer.shape, buffer.strides))
    address, nbytes, is_readonly = _native.buffer(array)
    return View(address, nbytes, _FORMATS.get(buffer.format.lstrip("@=<"), "u8"), CPU, array, is_readonly)


def _view_of_tensor(torch: Any, name: str, tensor: Any) -> View:
    if not tensor.is_contiguous():
        raise InvalidArgument(_not_contiguous(name, tuple(tensor.shape), tensor.stride()))
    if tensor.layout is not torch.strided:
        raise InvalidArgument(f"{name} has the layout {tensor.layout}, expected a dense tensor")
    kind = tensor.device.type
    if kind not in ("cpu", "cuda"):
        raise InvalidArgument(f"{name} is on the device {tensor.device}, expected the CPU or a GPU of CUDA or ROCm")
    device = CPU
    if kind == "cuda":
        device = (_ROCM if torch.version.hip else _CUDA, tensor.device.index or 0)
    nbytes = math.prod(tensor.shape) * tensor.element_size()
    return View(tensor.data_ptr(), nbytes, dtype_name(tensor.dtype), device, tensor)


def _not_contiguous(name: str, shape: Any, strides: Any) -> str:
    return f"{name} of shape {tuple(shape)} has the strides {tuple(strides)}, expected a contiguous array; copy it first"

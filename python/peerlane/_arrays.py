"""Finds the memory, type and device of arrays and tensors of other libraries."""

from __future__ import annotations

import functools
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
# The types of NumPy; unsigned integers for those that it lacks.
NUMPY_NAMES = {name: other for other, name in _DTYPES.items()} | {"bf16": "uint16", "f8e4m3": "uint8", "f8e5m2": "uint8"}
ITEMSIZE = {
    "u8": 1, "u16": 2, "u32": 4, "u64": 8, "i8": 1, "i16": 2, "i32": 4, "i64": 8,
    "f8e4m3": 1, "f8e5m2": 1, "f16": 2, "bf16": 2, "f32": 4, "f64": 8,
}  # fmt: skip
# The formats of the buffer protocol.
_FORMATS = {"b": "i8", "h": "i16", "i": "i32", "l": "i64", "q": "i64", "B": "u8", "H": "u16",
            "I": "u32", "L": "u64", "Q": "u64", "e": "f16", "f": "f32", "d": "f64"}  # fmt: skip


def dtype_name(dtype: Any) -> str:
    """Returns Peerlane's name of a type of Peerlane, PyTorch or NumPy."""
    if isinstance(dtype, str) and dtype in ITEMSIZE:
        return dtype
    try:
        name = _known_name(dtype)
        if name is None and "numpy" in sys.modules:
            name = _known_name(sys.modules["numpy"].dtype(dtype))
    except TypeError:
        name = None
    if name is None:
        raise InvalidArgument(f"dtype is {dtype!r}, expected one of {', '.join(ITEMSIZE)}, or such a type of NumPy or PyTorch")
    return name


@functools.cache
def _known_name(dtype: Any) -> str | None:
    if not getattr(dtype, "isnative", True):  # bytes in another order can be moved only
        return None
    name = getattr(dtype, "__name__", None) if isinstance(dtype, type) else getattr(dtype, "name", None)
    return _DTYPES.get(str(name or dtype).removeprefix("torch."))


class View:
    """The memory of an array. Types that only move, such as complex numbers, are bytes, and `type_name` is the name in errors."""

    __slots__ = ("address", "count", "device", "dtype", "is_readonly", "nbytes", "owner", "type_name")

    def __init__(self, address: int, nbytes: int, dtype: Any, device: tuple[int, int], owner: Any, is_readonly: bool = False):
        self.address, self.nbytes, self.device, self.owner, self.is_readonly = address, nbytes, device, owner, is_readonly
        name = dtype if dtype in ITEMSIZE else _known_name(dtype)
        self.dtype = name or "u8"
        self.type_name = None if name else str(dtype)
        self.count = nbytes // ITEMSIZE[self.dtype]


def view(name: str, array: Any) -> View:
    """Returns the memory of a contiguous array.

    Accepts tensors of PyTorch, objects with `__dlpack__`, and objects with the buffer protocol.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _view_of_tensor(torch, name, array)
    if isinstance(array, _native.Memory):
        return View(array.address, array.nbytes, array.dtype, tuple(array.device), array)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(array, numpy.generic):
        text = f"{name} is a {type(array).__name__}, which is a value without memory; expected an array, such as numpy.asarray(x) in a variable"
        raise InvalidArgument(text)
    if numpy is not None and isinstance(array, numpy.ndarray):  # whose types of extensions have no buffer
        if not array.flags.c_contiguous:
            raise InvalidArgument(_not_contiguous(name, array.shape, array.strides))
        address, is_readonly = array.__array_interface__["data"]
        return View(address, array.nbytes, array.dtype, CPU, array, is_readonly)
    if hasattr(array, "__dlpack__"):
        address, nbytes, dtype, device, keep = _native.from_dlpack(name, array)
        return View(address, nbytes, dtype or "a type of DLPack", device, keep)
    try:
        buffer = memoryview(array)
    except TypeError:
        text = f"{name} is a {type(array).__name__}, expected a tensor, or an object with `__dlpack__` or the buffer protocol"
        raise InvalidArgument(text) from None
    if not buffer.c_contiguous:
        raise InvalidArgument(_not_contiguous(name, buffer.shape, buffer.strides))
    address, nbytes, is_readonly = _native.buffer(array)
    # The owner is the buffer, so that the array cannot be resized meanwhile.
    return View(address, nbytes, _FORMATS.get(buffer.format.lstrip("@=<"), buffer.format), CPU, buffer, is_readonly)


def _view_of_tensor(torch: Any, name: str, tensor: Any) -> View:
    if tensor.layout is not torch.strided:
        raise InvalidArgument(f"{name} has the layout {tensor.layout}, expected a dense tensor")
    if not tensor.is_contiguous():
        raise InvalidArgument(_not_contiguous(name, tuple(tensor.shape), tensor.stride()))
    if tensor.is_conj() or tensor.is_neg():
        raise InvalidArgument(f"{name} is conjugated or negated lazily, expected plain values; call resolve_conj() or resolve_neg() first")
    kind = tensor.device.type
    if kind not in ("cpu", "cuda"):
        raise InvalidArgument(f"{name} is on the device {tensor.device}, expected the CPU or a GPU of CUDA or ROCm")
    device = CPU
    if kind == "cuda":
        device = (_ROCM if torch.version.hip else _CUDA, tensor.device.index or 0)
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes and tensor.data_ptr() == 0:
        text = f"{name} is a {type(tensor).__name__} without memory of its own, expected a plain tensor; use to_local() of a DTensor"
        raise InvalidArgument(text)
    return View(tensor.data_ptr(), nbytes, tensor.dtype, device, tensor)


def _not_contiguous(name: str, shape: Any, strides: Any) -> str:
    return f"{name} of shape {tuple(shape)} has the strides {tuple(strides)}, expected a contiguous array; copy it first"

"""Finds the memory, type and device of arrays and tensors of other libraries."""

from __future__ import annotations

import functools
import sys
from typing import Any, NamedTuple, NoReturn

from peerlane import _native
from peerlane._arguments import shown
from peerlane._errors import InvalidArgument

CPU = (1, 0)
_CUDA, _ROCM = 2, 10

_TYPES = _native.element_types()
# The names by those of NumPy, PyTorch and `ml_dtypes`.
_DTYPES = {python: name for name, python, *_ in _TYPES}
TORCH_NAMES = {name: python for name, python, *_ in _TYPES}
# The types of NumPy; unsigned integers for those that it lacks.
NUMPY_NAMES = {name: in_numpy for name, _, in_numpy, *_ in _TYPES}
ITEMSIZE = {name: size for name, _, _, size, _ in _TYPES}
_REDUCED = {name for name, *_, is_reduced in _TYPES if is_reduced}
# Other types, which only move, by their names in NumPy, PyTorch and `ml_dtypes`, with the bytes of an element.
_MOVED = {
    "bool": 1, "complex32": 4, "complex128": 16, "float4_e2m1fn_x2": 1, "float8_e3m4": 1, "float8_e4m3": 1,
    "float8_e4m3b11fnuz": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
}  # fmt: skip
# The kinds of numbers in formats of the buffer protocol, whose sizes are those of the elements: "l" has 4 or 8 bytes.
_FORMATS = {**dict.fromkeys("bhilqn", "int"), **dict.fromkeys("BHILQN", "uint"), **dict.fromkeys("efd", "float")}
# The last number of a type that NumPy itself has, other than objects. Types of extensions have larger numbers.
_NUMPY_TYPE_MAX = 23
_TYPES_MAX = 1024


def dtype_name(dtype: Any) -> str:
    """Returns Peerlane's name of a type of Peerlane, PyTorch or NumPy."""
    if isinstance(dtype, str) and dtype in ITEMSIZE:
        return dtype
    try:
        name = _known_name(dtype)
        if name is None and "numpy" in sys.modules:
            name = _known_name(sys.modules["numpy"].dtype(dtype))
    except Exception:  # NumPy raises several kinds for what is no type
        name = None
    if name is None:
        raise InvalidArgument(f"dtype is {shown(dtype)}, expected one of {', '.join(ITEMSIZE)}, or such a type of NumPy or PyTorch")
    return name


@functools.lru_cache(_TYPES_MAX)
def _known_name(dtype: Any) -> str | None:
    if not getattr(dtype, "isnative", True):  # bytes in another order can be moved only
        return None
    return _DTYPES.get(_plain_name(dtype))


def _plain_name(dtype: Any) -> str:
    name = getattr(dtype, "__name__", None) if isinstance(dtype, type) else getattr(dtype, "name", None)
    return str(name or dtype).removeprefix("torch.")


class ElementType(NamedTuple):
    """The type of elements. One that only moves is sent as `unit` unsigned bytes for each element."""

    # The name in errors: that of Peerlane, or that of NumPy for types that only move. Equal names are equal types.
    name: str
    itemsize: int
    # The type of the collective operation.
    dtype: str
    unit: int
    # Whether reductions combine such elements.
    is_reduced: bool


def _moved(name: str, itemsize: int) -> ElementType:
    return ElementType(name, itemsize, "u8", itemsize, False)


@functools.lru_cache(_TYPES_MAX)
def _element_type(dtype: Any) -> ElementType | None:
    """Returns the type of elements of Peerlane, NumPy, PyTorch or DLPack, or None if it is unknown or not made of plain bytes."""
    name = dtype if isinstance(dtype, str) and dtype in ITEMSIZE else _known_name(dtype)
    if name is not None:
        return ElementType(name, ITEMSIZE[name], name, 1, name in _REDUCED)
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(dtype, numpy.dtype):
        plain = _plain_name(dtype)
        return _moved(plain, _MOVED[plain]) if plain in _MOVED else None

    # Objects are addresses of this process, also inside of structures. A type of no bytes has no elements to count.
    if dtype.hasobject or dtype.itemsize == 0:
        return None
    if dtype.isnative and dtype.name in _MOVED:
        return _moved(dtype.name, dtype.itemsize)
    if dtype.names == ():  # a structure of padding alone, as NumPy reads the buffer of its own type V
        return _moved(f"|V{dtype.itemsize}", dtype.itemsize)
    # The bytes of a type of an extension can have any meaning, such as addresses, so only those above are known.
    return _moved(str(dtype), dtype.itemsize) if dtype.num <= _NUMPY_TYPE_MAX else None


@functools.lru_cache(_TYPES_MAX)
def _known_format(format: str, itemsize: int) -> ElementType | None:
    """Returns the type of a format of the buffer protocol that is one number, a boolean or a character."""
    order, code = (format[0], format[1:]) if format[:1] in ("@", "=", "<", ">", "!") else ("@", format)
    if code == "?":
        return _element_type("bool") if itemsize == 1 else None
    if code in ("Zf", "Zd") and order not in (">", "!"):
        return _element_type(f"complex{8 * itemsize}")
    if code in ("c", "s"):
        return _moved(f"|S{itemsize}", itemsize) if itemsize else None
    if code not in _FORMATS:
        return None
    kind = _FORMATS[code]
    if order in (">", "!") and itemsize > 1:
        return _moved(f">{kind[0]}{itemsize}", itemsize)
    return _element_type(f"{kind}{8 * itemsize}")


def _type_of_buffer(buffer: memoryview) -> ElementType | None:
    known = _known_format(buffer.format, buffer.itemsize)
    if known is not None:
        return known
    # NumPy understands structures and strings, and refuses pointers.
    try:
        import numpy

        dtype = numpy.asarray(buffer).dtype
    except Exception:
        return None
    return _element_type(dtype) if dtype.itemsize == buffer.itemsize else None


class View:
    """The memory of an array.

    `unwritable` says why the array cannot be an output, or is None.
    """

    __slots__ = ("address", "count", "device", "nbytes", "owner", "type", "unwritable")

    def __init__(self, address: int, nbytes: int, type: ElementType, device: tuple[int, int], owner: Any, unwritable: str | None = None):
        self.address, self.nbytes, self.device, self.owner, self.unwritable = address, nbytes, device, owner, unwritable
        self.type = type
        self.count = nbytes // type.itemsize


_READ_ONLY = "is read-only"


def view(name: str, array: Any) -> View:
    """Returns the memory of a contiguous array.

    Accepts tensors of PyTorch, objects with `__dlpack__`, and objects with the buffer protocol.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _view_of_tensor(torch, name, array)
    if isinstance(array, _native.Memory):
        return View(array.address, array.nbytes, _element_type(array.dtype), tuple(array.device), array)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(array, numpy.generic):
        text = f"{name} is a {type(array).__name__}, which is a value without memory; expected an array, such as numpy.asarray(x) in a variable"
        raise InvalidArgument(text)
    if numpy is not None and isinstance(array, numpy.ndarray):  # whose types of extensions have no buffer
        elements = _element_type(array.dtype) or _refuse_type(name, array.dtype)
        if not array.flags.c_contiguous:
            raise InvalidArgument(_not_contiguous(name, array.shape, array.strides))
        address, is_readonly = array.__array_interface__["data"]
        return View(address, array.nbytes, elements, CPU, array, _READ_ONLY if is_readonly else None)
    if hasattr(array, "__dlpack__"):
        return _view_by_dlpack(name, array)
    try:
        buffer = memoryview(array)
    except Exception:
        text = f"{name} is a {type(array).__name__}, expected a tensor, or an object with `__dlpack__` or the buffer protocol"
        raise InvalidArgument(text) from None
    elements = _type_of_buffer(buffer) or _refuse_type(name, buffer.format)
    if not buffer.c_contiguous:
        raise InvalidArgument(_not_contiguous(name, buffer.shape, buffer.strides))
    address, nbytes, is_readonly = _native.buffer(buffer)
    # The owner is the buffer, so that the array cannot be resized meanwhile.
    return View(address, nbytes, elements, CPU, buffer, _READ_ONLY if is_readonly else None)


def _view_by_dlpack(name: str, array: Any) -> View:
    address, nbytes, dtype, device, flags, owner = _native.from_dlpack(name, array)
    unwritable = None
    if (flags is not None and flags[0]) or _is_immutable(array, flags is not None):
        unwritable = _READ_ONLY
    elif flags is not None and flags[1]:
        unwritable = "was copied by its library for DLPack"
    return View(address, nbytes, _element_type(dtype), device, owner, unwritable)


def _is_immutable(array: Any, has_flags: bool) -> bool:
    """Returns whether an array cannot be written although its capsule does not say so."""
    for module, cls in (("jax", "Array"), ("tensorflow", "Tensor")):
        known = getattr(sys.modules.get(module), cls, None)
        if isinstance(known, type) and isinstance(array, known):
            return True
    if has_flags:
        return False
    # Capsules from before version 1.0 have no flags, but the buffer of the same array may say it.
    try:
        return memoryview(array).readonly
    except Exception:
        return False


def _refuse_type(name: str, dtype: Any) -> NoReturn:
    holds_objects = getattr(dtype, "hasobject", False) or (isinstance(dtype, str) and "O" in dtype)
    why = "which holds addresses of Python objects" if holds_objects else "which is not known to be plain bytes"
    raise InvalidArgument(f"{name} has elements of {dtype!s:.200}, {why}; expected numbers, booleans or strings of fixed size")


def _view_of_tensor(torch: Any, name: str, tensor: Any) -> View:
    if tensor.layout is not torch.strided:
        raise InvalidArgument(f"{name} has the layout {tensor.layout}, expected a dense tensor")
    if not tensor.is_contiguous():
        raise InvalidArgument(_not_contiguous(name, tuple(tensor.shape), tensor.stride()))
    if tensor.is_conj() or tensor.is_neg():
        raise InvalidArgument(f"{name} is conjugated or negated lazily, expected plain values; call resolve_conj() or resolve_neg() first")
    elements = _element_type(tensor.dtype) or _refuse_type(name, tensor.dtype)
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
    return View(tensor.data_ptr(), nbytes, elements, device, tensor)


def _not_contiguous(name: str, shape: Any, strides: Any) -> str:
    return f"{name} of shape {tuple(shape)} has the strides {tuple(strides)}, expected a contiguous array; copy it first"

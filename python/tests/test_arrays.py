"""Element types, makers of arrays, and arrays that must not be written."""

import ctypes
import struct
import sys

import numpy
import pytest

import peerlane

StringDType = getattr(getattr(numpy, "dtypes", None), "StringDType", None)


class ByDlpack:
    """Offers an array by DLPack alone, of version 1 and older, of version 1 alone, or of an older version alone."""

    def __init__(self, array, versions="both"):
        self.array, self.versions, self.asked = array, versions, []

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        self.asked.append(options.get("max_version"))
        if self.versions == "old" and "max_version" in options:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        if self.versions == "new" and "max_version" not in options:
            raise BufferError("expected a consumer of version 1")
        return self.array.__dlpack__(**options)


class Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Versioned(ctypes.Structure):
    pass


Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(Versioned))
Versioned._fields_ = (
    ("version", ctypes.c_uint32 * 2),
    ("context", ctypes.c_void_p),
    ("deleter", Deleter),
    ("flags", ctypes.c_uint64),
    ("tensor", Tensor),
)


class Made:
    """Offers bytes by a capsule whose numbers are free to choose, and counts how often they are given back."""

    def __init__(self, nbytes, code, bits, lanes=1, shape=None, flags=0, version=(1, 0), strides=None, offset=0):
        self.memory = (ctypes.c_uint8 * max(nbytes, 1))()
        shape = [8 * nbytes // max(bits * lanes, 1)] if shape is None else shape
        self.shape = (ctypes.c_int64 * len(shape))(*shape)
        self.strides = (ctypes.c_int64 * len(shape))(*strides) if strides else None
        self.given_back = 0
        self.deleter = Deleter(self._delete)
        self.managed = Versioned(version, None, self.deleter, flags)
        self.managed.tensor = Tensor(ctypes.addressof(self.memory), (1, 0), len(shape), code, bits, lanes, self.shape, self.strides, offset)

    def _delete(self, _):
        self.given_back += 1

    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self, **options):
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self.managed), b"dltensor_versioned", None)


def refuses(group, text, source, target=None):
    with pytest.raises(peerlane.InvalidArgument, match=text):
        group.all_to_all(source, source if target is None else target)


def objects(group):
    size = group.size
    held = numpy.array([object()] * size, object)
    nested = [
        numpy.zeros(size, [("number", "f4"), ("held", object)]),
        numpy.zeros(size, [("inner", [("held", object, (2, 2))])]),
        numpy.zeros(size, [("rows", [("number", "i8"), ("held", "O")], (3,))]),
    ]
    for source in [held, *nested]:
        refuses(group, r"elements of .*(object|'O').*, which holds addresses of Python objects", source)
        with pytest.raises(peerlane.InvalidArgument, match="elements of"):
            group.all_gather(numpy.zeros(1), source)
        with pytest.raises(peerlane.InvalidArgument, match="elements of"):
            group.broadcast(source)
        refuses(group, "elements of", memoryview(source))
    if StringDType is not None:
        refuses(group, r"elements of StringDType.*, which", numpy.array(["a", "b" * 100] * size, StringDType()))
    refuses(group, "elements of", (ctypes.py_object * size)())
    refuses(group, "elements of", (ctypes.c_char_p * size)())
    refuses(group, "elements of", (ctypes.POINTER(ctypes.c_int) * size)())
    refuses(group, "elements of", (ctypes.c_void_p * size)())

    class Pointing(ctypes.Structure):
        _fields_ = (("number", ctypes.c_int), ("pointer", ctypes.c_void_p))

    refuses(group, "elements of", (Pointing * size)())
    with pytest.raises(peerlane.InvalidArgument, match="elements of object"):
        group.window_over(held)
    refuses(group, "elements of", numpy.zeros(size, numpy.dtype([])))
    # The group goes on.
    assert group.all_reduce(numpy.ones(1))[0] == size


def test_objects_are_refused():
    peerlane.spawn(objects, 2)


TYPES = [
    *["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", "g", "S5", "U3", "V7", "M8[ns]", "m8[s]"],
    *[">i4", ">f8", ">c8", ">U2", "i4,f8", [("a", "?"), ("b", ">u2", (3,))]],
]


def filled(dtype, count, seed):
    dtype = numpy.dtype(dtype)
    random = numpy.random.default_rng(seed).integers(0, 2, count * dtype.itemsize, "u1")
    return random.view(dtype)


def makers(array):
    yield "NumPy", array
    if array.dtype.kind in "?biufc" and array.dtype.isnative and array.dtype.itemsize <= 16 and array.dtype.name != "float128":
        for versions in ("both", "new", "old"):
            yield f"DLPack, {versions}", ByDlpack(array, versions)
    if array.dtype.kind not in "mM":
        yield "buffer", memoryview(array)


def types_by_name(group):
    formats = {"f8e8m0": ("B", "uint8"), "f8e4m3": ("B", "uint8"), "complex64": ("Zf", "complex64"), "bf16": ("H", "uint16")}
    for name, (format, in_numpy) in formats.items():
        own = group.empty(3, dtype=name)
        assert own.dtype == in_numpy
        operation = group.prepare("all-gather", name, 3)
        assert memoryview(operation.input).format == format
        numpy.asarray(operation.input)[:] = filled(in_numpy, 3, group.rank)
        operation.run()
        expected = b"".join(filled(in_numpy, 3, rank).tobytes() for rank in range(group.size))
        assert numpy.asarray(operation.output).tobytes() == expected
    assert numpy.from_dlpack(group.prepare("all-gather", "complex64", 2).input).dtype == "complex64"
    for name in ("f8e8m0", "f8e4m3", "complex64"):
        with pytest.raises(peerlane.InvalidArgument, match=f"dtype is {name}, expected an integer, f16, bf16, f32 or f64"):
            group.prepare("all-reduce", name, 3)


def test_types_are_known_by_their_names():
    peerlane.spawn(types_by_name, 2)


def moves_of_all_types(group):
    size, me = group.size, group.rank
    for dtype in TYPES:
        sources = [filled(dtype, 3, rank) for rank in range(size)]
        for made_source, source in makers(sources[me]):
            # As bytes, because NumPy joins numbers in the byte order of the machine.
            expected = b"".join(each.tobytes() for each in sources)
            target = numpy.zeros(3 * size, dtype)
            for made_target, output in makers(target):
                target.view("u1")[:] = 7
                group.all_gather(source, output)
                assert target.tobytes() == expected, (dtype, made_source, made_target)
        # Counts are elements, also of types that only move.
        counts = [2, 1][:size] if size <= 2 else [2, 1] + [0] * (size - 2)
        mine = numpy.ascontiguousarray(sources[me][: counts[me]])
        joined = group.all_gather(mine, numpy.zeros(sum(counts), dtype), counts=numpy.array(counts))
        assert joined.tobytes() == b"".join(sources[rank][: counts[rank]].tobytes() for rank in range(size)), dtype
        splits = ([1] * size, [1] * size)
        swapped = group.all_to_all(filled(dtype, size, me), numpy.zeros(size, dtype), splits=splits)
        assert swapped.tobytes() == b"".join(filled(dtype, size, rank)[me : me + 1].tobytes() for rank in range(size)), dtype


def test_types_that_only_move_keep_name_and_size():
    peerlane.spawn(moves_of_all_types, 2)


def types_that_differ(group):
    pairs = [
        ("c8", "?"),
        ("c8", "f8"),
        ("?", "u1"),
        (">f4", "f4"),
        ("S4", "i4"),
        ("M8[s]", "m8[s]"),
        ("M8[s]", "M8[ns]"),
        ("i4,f8", "f8,i4"),
    ]
    for left, right in [*pairs, *(pair[::-1] for pair in pairs)]:
        source, target = numpy.zeros(24 // numpy.dtype(left).itemsize, left), numpy.zeros(24 // numpy.dtype(right).itemsize, right)
        for _, by in makers(source):
            for _, to in makers(target):
                refuses(group, "output has elements of .*, expected .* as in the input", by, to)
    refuses(group, r"output has elements of bool, expected complex64", numpy.zeros(1, "c8"), numpy.zeros(8, bool))


def test_types_that_differ_are_refused():
    peerlane.spawn(types_that_differ, 1)


def types_of_dlpack(group):
    numbers = [(0, bits) for bits in (8, 16, 32, 64)] + [(1, bits) for bits in (8, 16, 32, 64)] + [(2, bits) for bits in (16, 32, 64)]
    numbers += [(4, 16), (5, 32), (5, 64), (5, 128), (6, 8), *((code, 8) for code in range(7, 15))]
    for code, bits in numbers:
        source, target = Made(16, code, bits), Made(16, code, bits)
        source.memory[:] = range(16)
        group.all_to_all(source, target)
        assert bytes(target.memory) == bytes(range(16)), (code, bits)
        group.barrier()  # until which the group keeps the arrays of the last call
        assert source.given_back == 1, (code, bits)
    for code in range(256):
        for bits in (0, 1, 4, 6, 8, 12, 16, 24, 32, 64, 128, 255):
            if (code, bits) not in numbers:
                text = rf"array has elements of the code {code} of DLPack with {bits} bits and 1 lanes, expected integers"
                refuses(group, text, Made(16, code, bits, shape=[1]))
    refuses(group, "the code 2 of DLPack with 32 bits and 4 lanes", Made(16, 2, 32, 4))
    # Types of other libraries that are not those of NumPy's table.
    one = Made(16, 9, 8)
    refuses(group, "output has elements of bool, expected float8_e4m3b11fnuz", one, Made(16, 6, 8))
    for wrong in [{"shape": [-1]}, {"shape": [1 << 40, 1 << 40]}, {"shape": [4, 1 << 62, 4]}, {"shape": [2, 2], "strides": [1, 2]}]:
        made = Made(16, 2, 32, **wrong)
        refuses(group, "is not contiguous", made)
        assert made.given_back == 1, wrong
    refuses(group, "is not contiguous", Made(16, 2, 32, offset=(1 << 64) - 1))
    made = Made(16, 2, 32, version=(2, 3))
    refuses(group, r"is a tensor of DLPack 2\.3, expected version 1", made)
    assert made.given_back == 1
    empty = Made(0, 2, 32, shape=[0, 3], strides=[7, 7])
    group.all_to_all(empty, empty)

    class Wrong:
        def __init__(self, answer):
            self.answer = answer

        def __dlpack_device__(self):
            return 1, 0

        def __dlpack__(self, **options):
            if isinstance(self.answer, BaseException):
                raise self.answer
            return self.answer

    refuses(group, "expected a capsule", Wrong(5))
    refuses(group, "its library says: RuntimeError: no", Wrong(RuntimeError("no")))
    refuses(group, "its library says: TypeError: no", Wrong(TypeError("no")))
    with pytest.raises(KeyboardInterrupt):
        group.all_reduce(Wrong(KeyboardInterrupt()))
    used = numpy.zeros(1).__dlpack__()
    numpy.from_dlpack(type("Used", (), {"__dlpack__": lambda self, **options: used, "__dlpack_device__": lambda self: (1, 0)})())
    refuses(group, "that is not used yet", Wrong(used))


def test_types_of_dlpack_are_complete():
    peerlane.spawn(types_of_dlpack, 1)


def arrays_that_must_not_be_written(group):
    readonly = numpy.full(group.size, 5.0)
    readonly.flags.writeable = False
    good = numpy.ones(group.size)
    for array in [readonly, ByDlpack(readonly), ByDlpack(readonly, "new"), memoryview(readonly), bytes(8 * group.size)]:
        inputs = good if not isinstance(array, bytes) else numpy.ones(8 * group.size, "u1")
        refuses(group, "output is read-only, expected an array that can be written", inputs, array)
        output = numpy.zeros_like(inputs)
        group.all_to_all(array, output)
        assert (output == (0 if isinstance(array, bytes) else 5)).all()
        with pytest.raises(peerlane.InvalidArgument, match="array is read-only"):
            group.window_over(array)
        if not isinstance(array, bytes):
            with pytest.raises(peerlane.InvalidArgument, match="array is read-only"):
                group.all_reduce(array)
    # A root only reads what it broadcasts.
    shared = readonly if group.rank == 0 else numpy.zeros(group.size)
    assert (group.broadcast(shared, 0) == 5).all() and (readonly == 5).all()
    shared = ByDlpack(readonly)
    if group.size == 1:
        group.broadcast(shared)
    assert shared.asked == ([(1, 0)] if group.size == 1 else [])
    refuses(group, "output is read-only", numpy.zeros(2, "f8"), Made(16, 2, 64, flags=1))
    refuses(group, "output was copied by its library", numpy.zeros(2, "f8"), Made(16, 2, 64, flags=2))
    group.all_to_all(Made(16, 2, 64, flags=3), Made(16, 2, 64))


@pytest.mark.parametrize("ranks", [1, 2])
def test_arrays_that_are_read_only_are_inputs_but_no_outputs(ranks):
    peerlane.spawn(arrays_that_must_not_be_written, ranks)


class Immutable:
    """An array as JAX makes them: by a capsule of the old version, which has no flag for it."""

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        return self.array.__dlpack__()


def immutable(group):
    import types

    array = Immutable(numpy.full(2, 1.0))
    group.all_reduce(array)
    sys.modules["jax"] = types.SimpleNamespace(Array=Immutable)
    with pytest.raises(peerlane.InvalidArgument, match="array is read-only"):
        group.all_reduce(array)
    assert group.all_reduce(array, numpy.zeros(2)).tolist() == [1.0, 1.0]


def test_arrays_that_are_immutable_are_no_outputs():
    peerlane.spawn(immutable, 1)


def arrays_of_jax(group):
    import jax.numpy

    size, me = group.size, group.rank
    shared = jax.numpy.full(4, 1.0 + me)
    with pytest.raises(peerlane.InvalidArgument, match="read-only"):
        group.all_reduce(shared)
    assert shared.tolist() == [1.0 + me] * 4
    for dtype in ("bool", "int32", "uint8", "float32", "complex64", "bfloat16"):
        source = jax.numpy.ones(3, dtype)
        target = numpy.zeros(3 * size, jax.numpy.dtype(dtype))
        group.all_gather(source, target)
        assert (target == 1).all(), dtype
    with pytest.raises(peerlane.InvalidArgument, match="output has elements of bool, expected complex64"):
        group.all_gather(jax.numpy.ones(1, "complex64"), numpy.zeros(8 * size, bool))


def test_arrays_of_jax():
    pytest.importorskip("jax")
    peerlane.spawn(arrays_of_jax, 2)


def arrays_of_ctypes(group):
    size, me = group.size, group.rank
    for code, cls in [("b", ctypes.c_byte), ("h", ctypes.c_short), ("i", ctypes.c_int), ("l", ctypes.c_long), ("q", ctypes.c_longlong),
                      ("B", ctypes.c_ubyte), ("H", ctypes.c_ushort), ("I", ctypes.c_uint), ("L", ctypes.c_ulong),
                      ("Q", ctypes.c_ulonglong), ("f", ctypes.c_float), ("d", ctypes.c_double), ("?", ctypes.c_bool)]:  # fmt: skip
        source, target = (cls * 3)(me, 1, 0), (cls * (3 * size))()
        group.all_gather(source, target)
        assert list(target) == [x for rank in range(size) for x in (rank, 1, 0)], code
        group.all_gather(source, numpy.zeros(3 * size, code))
    rows = ((ctypes.c_float * 3) * 2)((1, 2, 3), (4, 5, 6))
    total = group.all_reduce(rows, ((ctypes.c_float * 3) * 2)())
    assert [list(row) for row in total] == [[size, 2 * size, 3 * size], [4 * size, 5 * size, 6 * size]]
    one = ctypes.c_int32(5)
    assert group.all_reduce(one).value == 5 * size

    class Pair(ctypes.Structure):
        _fields_ = (("number", ctypes.c_int32), ("factor", ctypes.c_float))

    pairs = group.all_gather((Pair * 1)((me, 0.5)), (Pair * size)())
    assert [(pair.number, pair.factor) for pair in pairs] == [(rank, 0.5) for rank in range(size)]
    with pytest.raises(peerlane.InvalidArgument, match="elements of >i4, which can be moved but not reduced"):
        group.all_reduce((ctypes.c_int32.__ctype_be__ * 2)())
    # "l" has four bytes with a standard size and eight with that of the machine.
    assert struct.calcsize("=l") == 4
    group.all_gather(memoryview(bytearray(4)).cast("i"), numpy.zeros(size, "i4"))


def test_arrays_of_ctypes():
    peerlane.spawn(arrays_of_ctypes, 2)


def shared_memory():
    """Returns the bytes of shared memory that this process has touched."""
    status = dict(line.split(":") for line in open("/proc/self/status"))
    return 1024 * int(status["RssShmem"].split()[0])


def memory_of_empty(group):
    step = 2 << 20
    group.barrier()  # for which the group takes memory
    before = shared_memory()
    first = group.empty(100 << 20, "u1")
    group.barrier()
    assert group.report()["memory"]["bytes"] == 100 << 20
    assert shared_memory() - before < step
    first[: 8 << 20] = 1
    assert 8 << 20 <= shared_memory() - before < (8 << 20) + step

    # Small arrays share a step, and an array that all ranks have freed gives its memory to the next one.
    small = [group.empty(1000, "u1") for _ in range(100)]
    in_steps = group.report()["memory"]["bytes"] - (100 << 20)
    assert in_steps % step == 0 and in_steps <= (100 << 20) // 4 + step
    del first
    second = group.empty(100 << 20, "u1")
    assert group.report()["memory"]["bytes"] == (100 << 20) + in_steps
    assert len(small) == 100 and len(second)

    group.reserve(8 << 20)
    group.empty(1, "u1")


def test_empty_takes_what_is_asked_for_and_touches_nothing():
    peerlane.spawn(memory_of_empty, 2)


def one_page_more(group):
    arrays = []
    for nbytes, taken in [(1, 2 << 20), ((2 << 20) - 512, 2 << 20), ((2 << 20) + 1, 6 << 20)]:
        arrays.append(group.empty(nbytes, "u1"))
        assert group.report()["memory"]["bytes"] == taken


def test_memory_of_empty_grows_in_steps():
    peerlane.spawn(one_page_more, 2)


def garbage_of_one_rank(group):
    kept = []
    for _ in range(5):
        array = group.empty(1 << 20, "u1")
        if group.rank == 1:
            kept.append(array)
    del array
    for nbytes in (1 << 50, 1 << 46):
        with pytest.raises(peerlane.OutOfMemory) as caught:
            group.empty(nbytes, "u1")
        text = str(caught.value)
        assert f"empty cannot allocate {nbytes} bytes" in text, text
        assert f"rank 0 holds 0 arrays of 0 bytes, rank 1 holds 5 arrays of {5 << 20} bytes" in text, text
    # The group goes on.
    group.empty(1 << 20, "u1")
    group.barrier()


def test_an_exhausted_arena_says_which_rank_holds_how_much():
    peerlane.spawn(garbage_of_one_rank, 2)

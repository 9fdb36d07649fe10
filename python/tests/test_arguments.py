"""Every argument of every public function refuses what it cannot be, by its name, and takes numbers of NumPy."""

import mmap
import os

import numpy
import pytest

import peerlane

NAN = float("nan")


class Failing:
    """Raises from everything that a check could call."""

    def _fail(self, *_):
        raise RuntimeError("called")

    __repr__ = __index__ = __float__ = __iter__ = __len__ = __eq__ = __bool__ = __hash__ = __getitem__ = _fail


# What no number is.
NO_NUMBERS = ["x", b"x", object(), [], {}, (1, 2, 3), [1.5], ["x"], 1j, int, slice(1), numpy.array(["a"]), "\ud800", Failing()]
NO_WHOLES = [*NO_NUMBERS, 2.5, NAN, float("inf"), numpy.float32(1), numpy.array([1.5]), 1 << 64, 1 << 100_000, -1, numpy.int8(-1)]
NO_SECONDS = [*NO_NUMBERS, NAN, float("inf"), 1 << 64, 1 << 100_000, numpy.float64(NAN)]
NO_TIMEOUTS = [*NO_SECONDS, 0, -1, -0.5]
NO_TEXTS = [value for value in [*NO_WHOLES, None] if not isinstance(value, str)]
NO_FLAGS = [*NO_WHOLES, 1]
NO_LISTS = [5, 2.5, None, "x", b"\x01", {1: 1}, {1}, [1.5], [-1], ["x"], [None], [1 << 64], numpy.ones(2), Failing()]

WHOLES = [1, True, numpy.int8(1), numpy.uint64(1), numpy.array(1)]
SECONDS = [5, 2.5, numpy.float32(2.5), numpy.int64(5), numpy.array(2.5)]


def without(values, *types):
    return [value for value in values if not isinstance(value, types)]


NO_ARRAYS = without(NO_WHOLES, bytes, numpy.ndarray)


def prepared(group, **options):
    values = {"collective": "all-reduce", "dtype": "f32", "count": 1, **options}
    return group.prepare(values.pop("collective"), values.pop("dtype"), values.pop("count"), **values)


def closed(group):
    if group is not None:
        group.close()


def opened(**options):
    closed(peerlane.open(**{"backend": "host", **options}))


def joined(**options):
    hub = peerlane.Hub("127.0.0.1:0", 1)
    opened(**{"hub": hub, "rank": 0, "ranks": 1, "start_timeout": 20, **options})


def waited(operation, timeout):
    start = operation.start()
    try:
        start.wait(timeout)
    finally:
        start.wait()


def arguments(group):
    """Returns the arguments: the text that names one, a call with a value, values that are wrong, and values that are right."""
    source, output, ones = numpy.ones(4, "f4"), numpy.zeros(4, "f4"), numpy.array([4])
    window = group.window(64)
    part = group.prepare("all-gather", "f32", 1, resizable=True, in_place=True, output=(window, 0))
    none_of_rank = [1, numpy.int64(1)]
    arena = open(os.memfd_create("arena"), "r+b", buffering=0)
    arena.truncate(2 * mmap.PAGESIZE)
    rows = [
        ("split: color", lambda it: closed(group.split(it)), NO_WHOLES, [*WHOLES, None]),
        ("split: key", lambda it: closed(group.split(0, it)), [*without(NO_WHOLES, int, numpy.int8), 1 << 64], [*WHOLES, -1]),
        ("subgroup: ranks", lambda it: closed(group.subgroup(it)), NO_LISTS, [[0], (0,), numpy.array([0]), range(1)]),
        ("window: nbytes", group.window, [*NO_WHOLES, None], WHOLES),
        ("window_over: array", group.window_over, [*NO_ARRAYS, None], [numpy.ones(8)]),
        (
            "window_over_descriptor: descriptor",
            lambda it: group.release(group.window_over_descriptor(it, 8)),
            [*NO_WHOLES, None, 1 << 31, 99_999],
            [arena.fileno(), arena],
        ),
        (
            "window_over_descriptor: nbytes",
            lambda it: group.release(group.window_over_descriptor(arena, it)),
            [*NO_WHOLES, None],
            WHOLES,
        ),
        (
            "window_over_descriptor: offset",
            lambda it: group.release(group.window_over_descriptor(arena, 8, it)),
            [*NO_WHOLES, None],
            [0, mmap.PAGESIZE],
        ),
        ("release: window", group.release, [*NO_WHOLES, None], []),
        ("exchange: data", group.exchange, without([*NO_WHOLES, None], bytes, list, tuple), [b"x"]),
        ("reserve: nbytes", group.reserve, [*NO_WHOLES, None], WHOLES),
        (
            "empty: shape",
            group.empty,
            without([*NO_WHOLES, None], list, tuple),
            [*WHOLES, (), [2, 3], numpy.array([2, 3])],
        ),
        (
            "empty: dtype",
            lambda it: group.empty(1, it),
            [1, 2.5, "x", b"x", NAN, object(), Failing()],
            ["f32", "f4", float, numpy.dtype("i8")],
        ),
        ("prepare: collective", lambda it: prepared(group, collective=it), NO_TEXTS, ["reduce", "all_reduce"]),
        ("prepare: dtype", lambda it: prepared(group, dtype=it), [1, 2.5, "x", NAN, object(), Failing()], ["f32", numpy.float32]),
        ("prepare: count", lambda it: prepared(group, count=it), [*NO_LISTS[1:], -1, 1 << 64, NAN], [*WHOLES, [1], numpy.array([1])]),
        ("prepare: root", lambda it: prepared(group, collective="reduce", root=it), [*NO_WHOLES, *none_of_rank], [0, numpy.uint8(0), None]),
        ("prepare: reduction", lambda it: prepared(group, reduction=it), [*without(NO_TEXTS, type(None)), "x"], ["max", None]),
        (
            "prepare: algorithm",
            lambda it: prepared(group, algorithm=it),
            [*without(NO_TEXTS, type(None)), "x"],
            ["direct", None],
        ),
        ("prepare: chunks", lambda it: prepared(group, chunks=it), [*NO_WHOLES, 0], [*WHOLES, None]),
        ("prepare: timeout", lambda it: prepared(group, timeout=it), NO_TIMEOUTS, [*SECONDS, None]),
        ("prepare: input", lambda it: prepared(group, input=it), [*NO_WHOLES, window, (window,), (1, 1)], [(window, 1), None]),
        ("prepare: the begin of input", lambda it: prepared(group, input=(window, it)), [*NO_WHOLES, None], WHOLES),
        ("prepare: the begin of output", lambda it: prepared(group, output=(window, it)), [*NO_WHOLES, None], WHOLES),
        (
            "prepare: the rows of matrix",
            lambda it: prepared(group, collective="all-gather", matrix=(it, "both")),
            [*NO_WHOLES, None],
            WHOLES,
        ),
        ("prepare: matrix", lambda it: prepared(group, collective="all-gather", matrix=it), NO_WHOLES, [(1, "both"), None]),
        ("resize: count", part.resize, [*NO_LISTS[1:], -1, 1 << 64, NAN], [*WHOLES, [1]]),
        ("resize: output", lambda it: part.resize(1, output=it), NO_WHOLES, [*WHOLES, None]),
        ("start_on: stream", part.start_on, [-1, 1 << 64, 2.5, "x", None, NAN, Failing()], []),
        ("timeout", part.run, NO_SECONDS, [*SECONDS, None]),
        ("timeout", lambda it: waited(part, it), NO_SECONDS, [*SECONDS, None]),
        ("memory: begin", lambda it: window.memory(it), NO_WHOLES, [*WHOLES, None]),
        ("memory: nbytes", lambda it: window.memory(0, it), NO_WHOLES, [*WHOLES, None]),
        ("memory: dtype", lambda it: window.memory(0, 8, it), [1, 2.5, "x", NAN, object(), Failing()], ["f32", "f4"]),
        ("address", lambda it: peerlane.Memory(it, 8, "f32", (1, 0), None), [*NO_WHOLES, None], [64]),
        ("nbytes", lambda it: peerlane.Memory(64, it, "f32", (1, 0), None), [*NO_WHOLES, None], [8, numpy.int64(8)]),
        ("dtype", lambda it: peerlane.Memory(64, 8, it, (1, 0), None), [*NO_TEXTS, "x"], ["f32"]),
        ("device", lambda it: peerlane.Memory(64, 8, "f32", it, None), [5, "x", None, (1,), (1, NAN), (1, 1 << 64)], [(1, 0)]),
        ("address", lambda it: peerlane.Hub(it, 1).close(), NO_TEXTS, ["127.0.0.1:0"]),
        ("ranks", lambda it: peerlane.Hub("127.0.0.1:0", it).close(), [*NO_WHOLES, None], WHOLES),
        ("secret", lambda it: peerlane.Hub("127.0.0.1:0", 1, it).close(), without(NO_TEXTS, type(None)), ["x" * 16]),
        ("open: hub", lambda it: opened(hub=it), without(NO_TEXTS, type(None)), []),
        ("open: rank", lambda it: joined(rank=it), [*NO_WHOLES, 1], [0, numpy.int8(0)]),
        ("open: ranks", lambda it: joined(ranks=it), [*NO_WHOLES, 2, 0], WHOLES),
        ("open: secret", lambda it: joined(secret=it), without(NO_TEXTS, type(None)), [None]),
        ("open: backend", lambda it: joined(backend=it), without(NO_TEXTS, type(None)), ["host"]),
        ("open: network", lambda it: joined(network=it), without(NO_TEXTS, type(None)), [None]),
        ("open: device", lambda it: joined(device=it), NO_WHOLES, [None]),
        ("open: timeout", lambda it: joined(timeout=it), NO_TIMEOUTS, [*SECONDS, None]),
        ("open: start_timeout", lambda it: joined(start_timeout=it), NO_TIMEOUTS, [*SECONDS, None]),
        ("open: strict", lambda it: joined(strict=it), NO_FLAGS, [True, False]),
        ("open: beside_compute", lambda it: joined(beside_compute=it), NO_FLAGS, [True, False]),
    ]
    for name in ("in_place", "capturable", "resizable", "check_starts", "strict", "beside_compute"):
        rows.append((f"prepare: {name}", lambda it, name=name: prepared(group, **{name: it}), NO_FLAGS, [False, None]))
    for name, arrays in [("all_gather", 2), ("broadcast", 1), ("all_to_all", 2), ("gather", 2), ("scatter", 2), ("reduce_scatter", 2),
                         ("all_reduce", 2), ("reduce", 2)]:  # fmt: skip
        call, given = getattr(group, name), [source, output][:arrays]
        rows += [
            (f"{name}: {'array' if arrays == 1 else 'input'}", lambda it, call=call, rest=given[1:]: call(it, *rest), NO_ARRAYS, [source]),
            (f"{name}: timeout", lambda it, call=call, given=given: call(*given, timeout=it), NO_SECONDS, [*SECONDS, None]),
            (f"{name}: wait", lambda it, call=call, given=given: call(*given, wait=it), [*NO_FLAGS, None], [True]),
            (f"{name}: beside_compute", lambda it, call=call, given=given: call(*given, beside_compute=it), NO_FLAGS, [True, False, None]),
            (f"{name}: stream", lambda it, call=call, given=given: call(*given, stream=it), NO_WHOLES, [None]),
        ]
        if arrays == 2:
            rows.append((f"{name}: output", lambda it, call=call: call(source, it), NO_WHOLES, [output]))
        if name in ("all_gather", "gather", "scatter"):
            rows.append(
                (
                    f"{name}: counts",
                    lambda it, call=call: call(source, output, counts=it),
                    without(NO_LISTS, type(None)),
                    [[4], (4,), ones, iter([4])],
                )
            )
        if name == "all_to_all":
            wrong = [5, "x", [1], ([4], 5), ([4.0], [4]), ([-4], [4]), ([1 << 64], [4]), Failing()]
            rows.append((f"{name}: splits", lambda it, call=call: call(source, output, splits=it), wrong, [([4], ones), [[4], (4,)]]))
        if name in ("broadcast", "gather", "scatter", "reduce"):
            wrong = [*NO_WHOLES, None, *none_of_rank]
            rows.append((f"{name}: root", lambda it, call=call, given=given: call(*given, root=it), wrong, [0, numpy.int64(0)]))
        if "reduce" in name:
            wrong = [*NO_TEXTS, "x"]
            rows.append((f"{name}: reduction", lambda it, call=call: call(source, output, reduction=it), wrong, ["max"]))
    return rows


def shown(value):
    try:
        return repr(value)[:80]
    except Exception:
        return type(value).__name__


def all_arguments(group):
    failures = []
    for name, call, wrong, right in arguments(group):
        for value in wrong:
            try:
                call(value)
                failures.append(f"{name} takes {shown(value)}")
            except peerlane.InvalidArgument as error:
                if not (str(error).startswith(name) and "expected" in str(error)):
                    failures.append(f"{name} of {shown(value)}: {error}")
            except Exception as error:
                failures.append(f"{name} of {shown(value)} raises {error!r}")
        for value in right:
            try:
                call(value)
            except Exception as error:
                failures.append(f"{name} refuses {shown(value)}: {error!r}")
    assert not failures, "\n".join(failures)


def test_all_arguments():
    peerlane.spawn(all_arguments, 1)


def nothing(group):
    pass


@pytest.mark.parametrize("ranks", [*NO_WHOLES, None, 0], ids=shown)
def test_the_ranks_of_spawn(ranks):
    with pytest.raises(peerlane.InvalidArgument, match="spawn: ranks is .*, expected a whole number from 1"):
        peerlane.spawn(nothing, ranks)


def test_the_options_of_spawn():
    with pytest.raises(peerlane.InvalidArgument, match="spawn: method is 'x', expected one of "):
        peerlane.spawn(nothing, 1, method="x")
    for timeout in NO_SECONDS:
        with pytest.raises(peerlane.Error, match="timeout is"):
            peerlane.spawn(nothing, 1, start_timeout=timeout)


def test_every_collective_has_a_method():
    from peerlane import _native

    for name in _native.Goal.names():
        assert callable(getattr(peerlane.Group, name.replace("-", "_"), None)), name

"""Random calls on arrays: the result is that of NumPy, or the call raises `peerlane.Error` on every rank that it concerns.

`PEERLANE_CASES` sets the number of cases, 500 by default. A failure prints the case, which `check` runs again.
"""

import math
import os

import numpy
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import peerlane

CASES = int(os.environ.get("PEERLANE_CASES", "500"))
CASES_OF_A_SPAWN = 100
GUARD = 64

NUMBERS = ["u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"]
MOVED = ["?", "c8", "c16", "g", "S3", "U2", "V5", "M8[s]", "m8[ns]", ">i4", ">f8", ">c8", "i4,f8"]
REFUSED = ["O", "i4,O", "(2,)O,u1"]
REDUCTIONS = ("reduce_scatter", "all_reduce", "reduce")
CALLS = ("all_gather", "broadcast", "all_to_all", "gather", "scatter", *REDUCTIONS)
MAKERS = ("numpy", "dlpack", "buffer", "ctypes")
WRONG_NUMBERS = [-1, -(1 << 40), 1 << 62, 1 << 64, 1 << 100_000, 0.5, 2.0, None, "1", [1], numpy.int64(-3), numpy.float32(1)]


class ByDlpack:
    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@st.composite
def cases(draw, ranks):
    """Draws a call that all ranks make. What differs between ranks is in lists by rank."""
    call = draw(st.sampled_from(CALLS))
    dtype = draw(st.sampled_from(NUMBERS if call in REDUCTIONS and draw(st.integers(0, 9)) else NUMBERS + MOVED + REFUSED))
    case = {
        "ranks": ranks,
        "call": call,
        "dtype": dtype,
        "root": draw(st.integers(0, ranks - 1)),
        "count": draw(st.one_of(st.integers(0, 9), st.sampled_from([63, 64, 65, 1000, 4097]))),
        "input_by": draw(st.sampled_from(MAKERS)),
        "output_by": draw(st.sampled_from(MAKERS)),
        "own": (draw(st.booleans()), draw(st.booleans())),
        "offset": draw(st.integers(0, 3)),
        "in_place": draw(st.integers(0, 3)) == 0,
        "wait": draw(st.booleans()),
        "reduction": draw(st.sampled_from(["sum", "max", "min"])),
        "seed": draw(st.integers(0, 1 << 30)),
    }
    if call in ("all_gather", "gather", "scatter") and draw(st.booleans()):
        case["counts"] = draw(st.lists(st.integers(0, 20), min_size=ranks, max_size=ranks))
    if call == "all_to_all" and draw(st.booleans()):
        row = st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks)
        case["table"] = draw(st.lists(row, min_size=ranks, max_size=ranks))
    # What is wrong with the call, if anything, on all ranks alike or, in `splits differ`, for one pair of them.
    wrong = ["", "", "", "strides", "readonly input", "readonly output", "other type", "other order", "short", "long", "root", "counts", "splits",
             "splits differ", "list", "reduction", "timeout", "lengths differ", "reversed"]  # fmt: skip
    case["wrong"] = draw(st.sampled_from(wrong))
    case["number"] = draw(st.integers(0, len(WRONG_NUMBERS) - 1))
    case["pair"] = (draw(st.integers(0, ranks - 1)), draw(st.integers(0, ranks - 1)))
    return case


def values(case, rank, count):
    """Returns the numbers of a rank: bytes for types that only move, small numbers for reductions."""
    dtype = numpy.dtype(case["dtype"])
    generator = numpy.random.default_rng((case["seed"], rank))
    if dtype.hasobject:
        return numpy.zeros(count, dtype)
    if dtype.kind in "iuf" and dtype.isnative and dtype.itemsize <= 8:
        return generator.integers(0, 30, count).astype(dtype)
    return generator.integers(0, 2, count * dtype.itemsize, "u1").view(dtype)


def sizes(case, rank):
    """Returns the elements of input and output of a rank; None where it has none."""
    ranks, call, count = case["ranks"], case["call"], case["count"]
    is_root = rank == case["root"]
    if "table" in case:
        return sum(case["table"][rank]), sum(row[rank] for row in case["table"])
    block, total = (case["counts"][rank], sum(case["counts"])) if "counts" in case else (count, ranks * count)
    return {
        "all_gather": (block, total),
        "broadcast": (count, count),
        "all_to_all": (total, total),
        "gather": (block, total if is_root else None),
        "scatter": (total if is_root else None, block),
        "reduce_scatter": (total, block),
        "all_reduce": (count, count),
        "reduce": (count, count if is_root else None),
    }[call]


def expected(case, rank):
    """Returns what NumPy computes as the output of a rank."""
    ranks, call = case["ranks"], case["call"]
    inputs = [values(case, each, sizes(case, each)[0] or 0) for each in range(ranks)]
    if call not in REDUCTIONS:
        # As plain bytes, because NumPy joins numbers in the byte order of the machine.
        inputs = [each.view(f"V{each.dtype.itemsize}") for each in inputs]
    if call in ("all_gather", "gather"):
        return numpy.concatenate(inputs)
    if call == "broadcast":
        return inputs[case["root"]]
    lens = case.get("counts", [case["count"]] * ranks)
    if call == "scatter":
        return inputs[case["root"]][sum(lens[:rank]) :][: lens[rank]]
    if call == "all_to_all":
        table = case.get("table", [lens] * ranks)
        return numpy.concatenate([inputs[each][sum(table[each][:rank]) :][: table[each][rank]] for each in range(ranks)])
    with numpy.errstate(all="ignore"):
        total = inputs[0].copy()
        for each in inputs[1:]:
            total = {"sum": numpy.add, "max": numpy.maximum, "min": numpy.minimum}[case["reduction"]](total, each).astype(total.dtype)
    return total[rank * case["count"] :][: case["count"]] if call == "reduce_scatter" else total


def made(by, array):
    """Returns another kind of object over the memory of an array."""
    dtype = array.dtype
    if by == "dlpack" and dtype.kind in "biufc" and dtype.isnative and dtype.name not in ("float128", "longdouble"):
        return ByDlpack(array)
    has_format = dtype.kind not in "mM" and not dtype.hasobject and (dtype.isnative or dtype.char not in "gG")
    if by == "buffer" and has_format:
        return memoryview(array)
    if by == "ctypes" and dtype.kind in "iuf" and dtype.isnative and dtype.itemsize != 2 and dtype.kind + str(dtype.itemsize) != "f16":
        cls = numpy.ctypeslib.as_ctypes_type(dtype) if array.flags.writeable else None
        if cls is not None and array.flags.c_contiguous:
            return (cls * array.size).from_buffer(array)
    return array


def new(group, case, count, is_own, offset):
    """Returns an array, and the bytes before and behind it, which no call may change."""
    dtype = numpy.dtype(case["dtype"])
    # Every rank allocates alike.
    is_collective = case["call"] not in ("gather", "scatter", "reduce") and not has_difference(case)
    if is_own and is_collective and dtype.kind in "iuf" and dtype.isnative and dtype.itemsize <= 8:
        return group.empty(count, dtype), None
    if dtype.hasobject:
        return numpy.zeros(count, dtype), None
    memory = numpy.full(2 * GUARD + offset + count * dtype.itemsize, 0xA5, "u1")
    return memory[GUARD + offset :][: count * dtype.itemsize].view(dtype), memory


def arguments(group, case, rank):
    """Returns input, output, options, the output as an array of NumPy, and the memory around it."""
    sent, received = sizes(case, rank)
    wrong, options = case["wrong"], {}
    source = target = memory = None
    if sent is not None:
        source, _ = new(group, case, sent, case["own"][0], case["offset"])
        source[...] = values(case, rank, sent)
    if received is not None:
        target, memory = new(group, case, received, case["own"][1], case["offset"])
        if not target.dtype.hasobject:
            target.view("u1")[...] = 0x5A
    call = case["call"]
    if call == "broadcast" or (case["in_place"] and call == "all_reduce"):
        if call == "broadcast" and rank == case["root"]:
            target[...] = source
        elif call == "all_reduce":
            target[...] = source
        source = target

    dtype = numpy.dtype(case["dtype"])
    wrong_number = WRONG_NUMBERS[case["number"]]
    given, output = source, target
    if call in ("broadcast", "gather", "scatter", "reduce"):
        options["root"] = wrong_number if wrong == "root" else case["root"]
    if call in REDUCTIONS:
        options["reduction"] = wrong_number if wrong == "reduction" else case["reduction"]
    if "counts" in case:
        options["counts"] = [wrong_number, *case["counts"][1:]] if wrong == "counts" else numpy.array(case["counts"])
    if "table" in case:
        send, receive = list(case["table"][rank]), [row[rank] for row in case["table"]]
        if wrong == "splits":
            # The sum fits where the number is one.
            side = send if case["seed"] % 2 else receive
            side[0] = wrong_number
            if isinstance(wrong_number, int) and len(side) > 1:
                side[1] = sum(row for row in case["table"][rank]) - wrong_number - sum(side[2:])
        options["splits"] = (send, receive)
    if wrong == "timeout":
        options["timeout"] = wrong_number
    if wrong == "strides" and given is not None and dtype.itemsize:
        given = numpy.zeros((len(source), 2), dtype)[:, 0]
        given[...] = source
    if wrong == "reversed" and given is not None:
        given = source[::-1]
    if wrong == "readonly input" and given is not None and given is not target:
        given = given.view()
        given.flags.writeable = False
    if wrong == "readonly output" and output is not None:
        is_same = given is output
        output = output.view()
        output.flags.writeable = False
        given = output if is_same else given
    if wrong in ("other type", "other order") and output is not None and given is not output:
        other = {"other type": numpy.dtype("f4" if dtype != "f4" else "?"), "other order": dtype.newbyteorder()}[wrong]
        output = numpy.zeros(len(target), other)
    if wrong in ("short", "long") and given is not None and given is not target:
        given = numpy.zeros(max(0, len(source) + (1 if wrong == "long" else -1)), dtype)
    if wrong == "list" and given is not None:
        given = [0] * len(given)

    is_same = given is output
    if isinstance(given, numpy.ndarray):
        given = made(case["input_by"], given)
    if isinstance(output, numpy.ndarray):
        output = given if is_same else made(case["output_by"], output)
    return given, output, options, target, memory


def has_difference(case):
    """Returns whether ranks give lengths that differ, in a way that each of them alone cannot see."""
    first, second = case["pair"]
    if case["wrong"] == "splits differ" and "table" in case:
        return first != second
    return case["wrong"] == "lengths differ" and case["ranks"] > 1 and case["call"] in ("all_gather", "all_to_all") and "counts" not in case


def with_difference(case, rank):
    """Returns the case as a rank sees it."""
    first, second = case["pair"]
    if not has_difference(case):
        return case
    if case["wrong"] == "lengths differ":
        return {**case, "count": case["count"] + rank} if "table" not in case else case
    # The first rank sends one element more to the second one, which does not know of it.
    table = [list(row) for row in case["table"]]
    if rank == first:
        table[first][second] += 1
    return {**case, "table": table}


def check(group, case):
    """Makes the call, and returns the error, or None if the result is that of NumPy."""
    rank = group.rank
    mine = with_difference(case, rank)
    try:
        given, output, options, target, memory = arguments(group, mine, rank)
    except peerlane.Error as error:
        return error  # another rank has refused its arguments meanwhile
    call, wait = getattr(group, case["call"]), case["wait"]
    try:
        positional = (output,) if case["call"] == "broadcast" else (given, output)
        result = call(*positional, wait=wait, **options)
        if not wait:
            result.wait()
    except peerlane.Error as error:
        result = error
    except TimeoutError:
        # The limit of this wait has passed, and the start goes on.
        result = group._calls.finish()
    if memory is not None:
        begin = GUARD + case["offset"]
        around = numpy.concatenate([memory[:begin], memory[len(memory) - GUARD :]])
        assert (around == 0xA5).all(), "bytes around the output were written"
    if isinstance(result, peerlane.Error):
        return result
    assert not numpy.dtype(case["dtype"]).hasobject, "objects were moved"
    is_changed = case["wrong"] in ("other type", "other order") and target is not None and output is not target
    # A rank that has no part in a difference of splits can be complete before the others find it, with what the first one has sent.
    sent = with_difference(case, case["pair"][0]) if case["wrong"] == "splits differ" else mine
    if target is not None and not is_changed:
        assert target.tobytes() == expected(sent, rank).tobytes(), "the result is not that of NumPy"
    return None


def must_succeed(case):
    dtype = numpy.dtype(case["dtype"])
    if dtype.hasobject or (case["call"] in REDUCTIONS and case["dtype"] not in NUMBERS):
        return False
    return case["wrong"] in ("", "readonly input")


def must_fail(case):
    """Returns whether the call must fail on some rank."""
    dtype = numpy.dtype(case["dtype"])
    if dtype.hasobject:
        return True
    if case["wrong"] == "splits differ" or case["wrong"] == "lengths differ":
        return has_difference(case) and not (case["wrong"] == "lengths differ" and "table" in case)
    number = WRONG_NUMBERS[case["number"]]
    is_timeout = isinstance(number, (int, float, numpy.number)) and -math.inf < number < 1 << 63
    return {
        "root": case["call"] in ("broadcast", "gather", "scatter", "reduce"),
        "counts": "counts" in case,
        "splits": "table" in case,
        "reduction": case["call"] in REDUCTIONS,
        "timeout": not is_timeout and number is not None,
        "list": case["call"] != "broadcast",
        "readonly output": case["call"] != "broadcast",
    }.get(case["wrong"], False)


def run_cases(group, drawn):
    """Runs cases in parts of a group. After an error, the ranks leave the part and form another one."""
    part = group.split(0)
    failed = 0
    for case in drawn:
        try:
            error = check(part, case)
        except Exception as other:
            raise AssertionError(f"{type(other).__name__}: {other}; the case is {case!r}") from other
        # The ranks that wait for one that has refused its arguments must not wait for long.
        if error is not None:
            part.abandon()
        outcomes = [
            theirs.decode() for theirs in group.exchange(("" if error is None else f"{type(error).__name__}: {error}"[:300]).encode())
        ]
        if any(outcomes):
            failed += 1
            part.abandon()
            part = group.split(0)
            assert not must_succeed(case), f"a good call failed: {outcomes}; the case is {case!r}"
        else:
            assert not must_fail(case), f"a bad call was accepted; the case is {case!r}"
        if has_difference(case) and must_fail(case) and not numpy.dtype(case["dtype"]).hasobject:
            assert any("Mismatch" in outcome for outcome in outcomes), f"no mismatch: {outcomes}; the case is {case!r}"
    part.close()
    return failed


def drawn_cases(count, ranks, first_seed):
    """Draws cases for a number of ranks, equal in every run."""
    drawn = []

    @seed(first_seed)
    @settings(max_examples=count, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(cases(ranks))
    def draw(case):
        drawn.append(case)

    draw()
    return drawn


@pytest.mark.parametrize("batch", range(-(-CASES // CASES_OF_A_SPAWN)))
def test_calls_give_the_result_of_numpy_or_an_error(batch):
    ranks = (2, 3, 1, 2, 3)[batch % 5]
    drawn = drawn_cases(CASES_OF_A_SPAWN, ranks, batch)
    failures = peerlane.spawn(run_cases, ranks, drawn, timeout=5)
    # Both kinds of cases are there.
    assert 5 < failures[0] < len(drawn) - 5

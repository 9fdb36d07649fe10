"""Every collective, every type, sizes that differ, and memory with and without copies, on 1 to 4 ranks."""

import re
from pathlib import Path

import numpy
import pytest

import peerlane

TYPES = ["uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64"]
RANKS = [1, 2, 3, 4]


def values(rank, count, dtype, seed=0):
    numbers = numpy.random.default_rng(1000 * seed + rank).integers(0, 100, count)
    return numbers.astype(dtype)


def array(group, count, dtype, is_own):
    """An array of the library, which is not copied, or any other one."""
    return group.empty(count, dtype) if is_own else numpy.zeros(count, dtype)


def every_collective(group, dtype, is_own):
    size, me = group.size, group.rank
    for seed, count in enumerate([1, 3, 1000, 70_001]):
        inputs = [values(rank, count, dtype, seed) for rank in range(size)]
        wide = [values(rank, count * size, dtype, seed + 50) for rank in range(size)]

        def filled(numbers):
            own = array(group, len(numbers), dtype, is_own)
            own[:] = numbers
            return own

        gathered = group.all_gather(filled(inputs[me]), array(group, size * count, dtype, is_own))
        assert numpy.array_equal(gathered, numpy.concatenate(inputs))
        in_place = array(group, size * count, dtype, is_own)
        block = in_place[me * count : (me + 1) * count]
        block[:] = inputs[me]
        group.all_gather(block, in_place)
        assert numpy.array_equal(in_place, numpy.concatenate(inputs))
        root = (seed + 1) % size
        assert numpy.array_equal(group.broadcast(filled(inputs[me]), root), inputs[root])
        swapped = group.all_to_all(filled(wide[me]), array(group, size * count, dtype, is_own))
        assert numpy.array_equal(swapped.reshape(size, count), [row.reshape(size, count)[me] for row in wide])
        target = array(group, size * count, dtype, is_own)
        group.gather(filled(inputs[me]), target if me == root else None, root)
        assert me != root or numpy.array_equal(target, numpy.concatenate(inputs))
        source = filled(wide[root])
        part = group.scatter(source if me == root else None, array(group, count, dtype, is_own), root)
        assert numpy.array_equal(part, wide[root].reshape(size, count)[me])
        total = numpy.sum(wide, axis=0, dtype=dtype)
        part = group.reduce_scatter(filled(wide[me]), array(group, count, dtype, is_own))
        assert numpy.array_equal(part, total.reshape(size, count)[me])
        assert numpy.array_equal(group.all_reduce(filled(wide[me])), total)
        smallest = group.all_reduce(filled(wide[me]), array(group, size * count, dtype, is_own), "min")
        assert numpy.array_equal(smallest, numpy.min(wide, axis=0))
        sums = array(group, size * count, dtype, is_own)
        group.reduce(filled(wide[me]), sums if me == root else None, root, "max")
        assert me != root or numpy.array_equal(sums, numpy.max(wide, axis=0))
        running = group.scan(filled(wide[me]), array(group, size * count, dtype, is_own))
        assert numpy.array_equal(running, numpy.sum(wide[: me + 1], axis=0, dtype=dtype))
        assert numpy.array_equal(group.scan(filled(wide[me])), running)
        before = filled(wide[me])
        group.exscan(before, before)
        assert numpy.array_equal(before, numpy.sum(wide[:me], axis=0, dtype=dtype) if me else wide[0])
        group.exscan(filled(wide[me]), None if me == 0 else before, "max")
        assert me == 0 or numpy.array_equal(before, numpy.max(wide[:me], axis=0))


def collectives_of_all_types(group, is_own):
    for dtype in TYPES if group.size == 2 else ["int8", "float32", "int64"]:
        every_collective(group, dtype, is_own)
    return group.report()


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("is_own", [False, True])
def test_every_collective_and_type(ranks, is_own):
    reports = peerlane.spawn(collectives_of_all_types, ranks, is_own, timeout=60)
    assert {report["operations"]["misses"] for report in reports} == {reports[0]["operations"]["misses"]}


def sizes_of_their_own(group):
    size, me = group.size, group.rank
    random = numpy.random.default_rng(7)
    for _ in range(30):
        counts = [int(count) for count in random.integers(0, 50, size)]
        mine = values(me, counts[me], "int32")
        all = group.all_gather(mine, numpy.zeros(sum(counts), "int32"), counts=counts)
        assert numpy.array_equal(all, numpy.concatenate([values(rank, counts[rank], "int32") for rank in range(size)]))
        whole = [values(rank, sum(counts), "int32", 3) for rank in range(size)]
        part = group.reduce_scatter(whole[me], numpy.zeros(counts[me], "int32"), counts=counts)
        begin = sum(counts[:me])
        own = group.empty(64, "int32")  # the part of one rank can be all of it, while that of another is not
        assert numpy.array_equal(group.reduce_scatter(whole[me], own[: counts[me]], counts=counts), part)
        assert numpy.array_equal(part, numpy.sum(whole, axis=0, dtype="int32")[begin : begin + counts[me]])
        table = random.integers(0, 40, (size, size))
        send, receive = table[me].tolist(), table[:, me].tolist()
        source = values(me, sum(send), "int16")
        target = group.all_to_all(source, numpy.zeros(sum(receive), "int16"), splits=(send, receive))
        expected = []
        for rank in range(size):
            begin = table[rank][:me].sum()
            expected.append(values(rank, table[rank].sum(), "int16")[begin : begin + table[rank][me]])
        assert numpy.array_equal(target, numpy.concatenate(expected))


@pytest.mark.parametrize("ranks", RANKS)
def test_blocks_of_different_sizes(ranks):
    peerlane.spawn(sizes_of_their_own, ranks)


def resized_reductions(group):
    size, me = group.size, group.rank
    random = numpy.random.default_rng(11)
    reduce = group.prepare("all-reduce", "i32", 20000, resizable=True)
    in_place = group.prepare("all-reduce", "i32", 300, resizable=True, in_place=True)
    scatter = group.prepare("reduce-scatter", "i32", [70] * size, resizable=True)
    for start in range(20):
        for operation, most in ((reduce, 20000), (in_place, 300)):
            count = int(random.integers(0, [most, 20][start % 2]))
            whole = [values(rank, count, "int32", start) for rank in range(size)]
            operation.resize([count] * size if start % 3 else count)
            numpy.asarray(operation.input)[:] = whole[me]
            operation.run()
            assert numpy.array_equal(operation.output, numpy.sum(whole, axis=0, dtype="int32"))
        counts = [int(count) for count in random.integers(0, 71, size)]
        whole = [values(rank, sum(counts), "int32", start) for rank in range(size)]
        scatter.resize(counts)
        numpy.asarray(scatter.input)[:] = whole[me]
        scatter.run()
        begin = sum(counts[:me])
        assert numpy.array_equal(scatter.output, numpy.sum(whole, axis=0, dtype="int32")[begin : begin + counts[me]])
    with pytest.raises(peerlane.InvalidArgument, match="the input is 20001 elements, expected at most the 20000 elements"):
        reduce.resize(20001)
    if size > 1:
        with pytest.raises(peerlane.InvalidArgument, match="expected one length for all ranks in an all-reduce"):
            reduce.resize([1] * (size - 1) + [2])


@pytest.mark.parametrize("ranks", RANKS)
def test_reductions_of_other_lengths_in_each_start(ranks):
    peerlane.spawn(resized_reductions, ranks)


def one_operation_serves_all_sizes(group):
    for count in [4096, 1, 0, 77, 4095]:
        target, source = group.empty(count * group.size, "float32"), group.empty(count, "float32")
        source[:] = group.rank
        group.all_gather(source, target)
        assert numpy.array_equal(target, numpy.repeat(numpy.arange(group.size), count))
    report = group.report()
    assert [(path["collective"], path["calls"]) for path in report["paths"]] == [("all-gather", 5)], report
    assert report["operations"] == {"kept": 1, "hits": 4, "misses": 1} and report["calls_with_copies"] == 0, report
    # Parts can begin at another place on each rank, so they are copied.
    places = group.empty(10 * group.size, "float32")
    part = places[10 * group.rank : 10 * group.rank + 10]
    group.reduce_scatter(numpy.ones(10 * group.size, "float32"), part)
    assert (part == group.size).all() and group.report()["calls_with_copies"] == 1


def test_one_operation_serves_all_sizes():
    peerlane.spawn(one_operation_serves_all_sizes, 2)


def other_kinds_of_arrays(group):
    from array import array

    mine, all = array("d", [group.rank, 0.5]), bytearray(16 * group.size)
    group.all_gather(memoryview(mine).cast("B"), all)
    assert numpy.frombuffer(all, "float64").tolist() == [x for rank in range(group.size) for x in (rank, 0.5)]

    class OnlyDlpack:
        def __init__(self, inner):
            self.inner = inner

        def __dlpack__(self, **options):
            return self.inner.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.inner.__dlpack_device__()

    source, target = numpy.full((2, 3), group.rank, "int64"), numpy.zeros((group.size, 2, 3), "int64")
    group.all_gather(OnlyDlpack(source), OnlyDlpack(target))
    assert (target == numpy.arange(group.size)[:, None, None]).all()
    memory = group.prepare("all-gather", "f32", 3).input
    assert numpy.from_dlpack(memory).shape == (3,) and numpy.asarray(memory).dtype == "float32"
    assert memory.__dlpack__(max_version=(1, 0)) is not None
    with pytest.raises(peerlane.InvalidArgument, match="contiguous"):
        group.all_gather(OnlyDlpack(numpy.zeros((4, 4))[:, ::2]), numpy.zeros(8 * group.size))


def test_other_kinds_of_arrays():
    peerlane.spawn(other_kinds_of_arrays, 2)


def prepared_operations(group):
    gather = group.prepare("all_gather", numpy.float32, 3)
    numpy.asarray(gather.input)[:] = group.rank
    gather.run()
    expected = numpy.repeat(numpy.arange(group.size, dtype="float32"), 3)
    assert numpy.array_equal(gather.output, expected)
    future = gather.start()
    future.wait(timeout=10)
    assert future.done() and numpy.array_equal(future.wait(), expected)
    report = gather.report()
    assert report["collective"] == "all-gather" and report["output_bytes"] == 12 * group.size and report["proof"]
    # Each rank has some rows with all columns, and gets its columns of all rows; and back.
    rows, width = 3, 2
    mine = numpy.arange(rows * group.size * width, dtype="i4").reshape(rows, -1) + 1000 * group.rank
    there = group.prepare("all-to-all", "i4", rows * width, matrix=(rows, "input"))
    back = group.prepare("all-to-all", "i4", rows * width, matrix=(rows, "output"))
    numpy.asarray(there.input)[:] = mine.ravel()
    there.run()
    columns = mine[:, group.rank * width :][:, :width] - 1000 * group.rank
    assert numpy.array_equal(
        numpy.asarray(there.output).reshape(-1, width), numpy.concatenate([columns + 1000 * rank for rank in range(group.size)])
    )
    numpy.asarray(back.input)[:] = there.output
    back.run()
    assert numpy.array_equal(numpy.asarray(back.output).reshape(rows, -1), mine)
    with pytest.raises(peerlane.InvalidArgument, match="the sides of matrix"):
        group.prepare("all-to-all", "i4", rows, matrix=(rows, "left"))
    window = group.window(1 << 16)
    part = group.prepare("all-gather", "i32", 100, resizable=True, in_place=True, output=(window, 0))
    for count, begin in [(100, 0), (3, 1000), (0, 0)]:
        part.resize(count, output=begin)
        view = numpy.asarray(window.memory(4 * begin, 4 * count * group.size, "int32"))
        view[group.rank * count : (group.rank + 1) * count] = group.rank + 5
        part.run()
        assert numpy.array_equal(view, numpy.repeat(numpy.arange(group.size) + 5, count))
    part.drop()
    del view
    group.release(window)
    with pytest.raises(peerlane.InvalidArgument, match="released"):
        window.memory()
    window = group.window(64)
    kept = numpy.asarray(window.memory())
    with pytest.raises(peerlane.InvalidArgument, match="1 arrays or tensors of the window are in use"):
        group.release(window)
    del kept
    user = group.prepare("all-gather", "u1", 8, in_place=True, output=(window, 0))
    with pytest.raises(peerlane.InvalidArgument, match="still used"):
        group.release(window)
    user.drop()
    group.release(window)
    futures = [group.all_gather(numpy.full(2, group.rank), numpy.zeros(2 * group.size, "int64"), wait=False) for _ in range(3)]
    assert all(future.wait()[-1] == group.size - 1 for future in futures)


@pytest.mark.parametrize("ranks", [1, 3])
def test_prepared_operations(ranks):
    peerlane.spawn(prepared_operations, ranks)


def parts_of_a_group(group):
    part = group.split(group.rank % 2, key=-group.rank)
    ranks = part.all_gather(numpy.array([group.rank]), numpy.zeros(part.size, "int64"))
    assert ranks.tolist() == [rank for rank in range(group.size)[::-1] if rank % 2 == group.rank % 2]
    part.close()
    assert group.split(None if group.rank else 0, 0) is None or group.rank == 0
    rows = group.subgroup([0, 1] if group.rank < 2 else [2, 3])
    assert rows.size == 2 and rows.exchange(bytes([group.rank])) == [bytes([rank]) for rank in ([0, 1] if group.rank < 2 else [2, 3])]
    group.barrier()


def test_parts_of_a_group():
    peerlane.spawn(parts_of_a_group, 4)


def memory_is_counted_and_released(group):
    group.barrier()
    held = lambda: {one["kind"]: one["bytes"] for one in group.stats()["memory"]}  # noqa: E731
    before = held()
    assert all(one["space"] == "host" and one["device"] is None for one in group.stats()["memory"])
    operation = group.prepare("all-reduce", "f32", 1 << 20)
    kinds = {one["kind"] for one in operation.report()["memory"]}
    assert {"heap", "inboxes", "flags"} <= kinds
    during = held()
    assert during["inboxes"] >= 4 << 20 and during["heap"] >= before.get("heap", 0) + (8 << 20)
    del operation
    assert group.trim() >= 12 << 20
    assert held().get("inboxes", 0) == before.get("inboxes", 0)
    assert group.trim() == 0


def test_memory_is_counted_and_released():
    peerlane.spawn(memory_is_counted_and_released, 2)


def memory_is_used_again(group):
    kept = []
    random = numpy.random.default_rng(3)
    for step in range(300):
        block = group.empty(int(random.integers(1, 60_000)), "float32")
        block[:] = group.rank * 1000 + step
        kept.append((block, block.__array_interface__["data"][0]))
        # Ranks free at different times.
        if len(kept) > 3 + group.rank * 2:
            old, _ = kept.pop(0)
            assert (old == group.rank * 1000 + step - len(kept)).all()
    report = group.report()["memory"]
    assert 0 < report["exchanges"] < 100 and report["bytes"] < 12 << 20, report
    places = group._calls.arena
    mine = [place - places.windows[0].address for _, place in kept[-3:]]
    assert len({str(theirs) for theirs in group.exchange(str(mine).encode())}) == 1


def test_memory_is_used_again_at_equal_places():
    peerlane.spawn(memory_is_used_again, 3)


def many_iterations(group):
    import gc
    import os
    import resource

    def threads():
        for task in os.listdir("/proc/self/task"):
            try:
                name = Path(f"/proc/self/task/{task}/comm").read_text().strip()
            except OSError:
                continue  # it has ended
            # The thread of a call can still end when the call has returned.
            if name != "peerlane call":
                yield name

    def used():
        return len(os.listdir("/proc/self/fd")), sorted(threads())

    source, target = numpy.zeros(16, "float32"), numpy.zeros(16 * group.size, "float32")
    before = None
    for step in range(10_000):
        source[:] = step + group.rank
        group.all_gather(source, target)
        assert target[0] == step and target[-1] == step + group.size - 1
        if step % 100 == 0:
            group.empty(50_000)
        if step == 2000:
            group.barrier()  # no exchange is in progress
            gc.collect()
            before = (*used(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, len(gc.get_objects()))
    group.barrier()
    gc.collect()
    after = (*used(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, len(gc.get_objects()))
    assert after[:2] == before[:2] and after[2] <= before[2] + 2048 and after[3] <= before[3] + 50, (before, after)


def test_many_iterations_do_not_grow():
    peerlane.spawn(many_iterations, 2)


def reductions_of_nan(group):
    me, nan = group.rank, numpy.nan
    # NaN on no rank, on the first, on the last, and on both.
    mine = numpy.array([1.0 + me, nan if me == 0 else 2.0, nan if me == 1 else 3.0, nan])
    for dtype in ("float16", "float32", "float64"):
        source = mine.astype(dtype)
        numbers = {
            "max": [2.0, 2.0, 3.0, nan],
            "min": [1.0, 2.0, 3.0, nan],
            "maximum": [2.0, nan, nan, nan],
            "minimum": [1.0, nan, nan, nan],
            "sum": [3.0, nan, nan, nan],
            "average": [1.5, nan, nan, nan],
        }
        for reduction, expected in numbers.items():
            numpy.testing.assert_array_equal(group.all_reduce(source, numpy.empty_like(source), reduction), numpy.array(expected, dtype))


def test_max_and_min_prefer_a_number_to_a_nan_and_maximum_and_minimum_do_not():
    peerlane.spawn(reductions_of_nan, 2)


def counted(group):
    few, many = numpy.ones(3, "f4"), numpy.empty(3 * group.size, "f4")
    for _ in range(2):
        group.all_gather(few, many)
    group.all_reduce(few)


def test_a_report_is_printed_at_the_end(monkeypatch, capfd):
    monkeypatch.setenv("PEERLANE_REPORT", "1")
    peerlane.spawn(counted, 2)
    printed = capfd.readouterr().err
    assert printed.count("3 calls of rank 0 in a group of 2, 3 with copies") == 1, printed
    assert re.search(r" 2  all-gather: direct on \w+\n +1  all-reduce \([\w-]+\): direct on \w+\n", printed), printed

"""Arguments that one rank refuses are errors on all ranks at once, and the group goes on."""

import os
import time

import numpy
import pytest

import peerlane


def refused(group, word, call, good, bad):
    """Makes a call in which rank 1 gives a bad argument, and then the right call."""
    with pytest.raises(peerlane.Error) as caught:
        call(bad if group.rank == 1 else good)
    error = caught.value
    assert word in str(error), error
    if group.rank == 1:
        assert type(error) is peerlane.InvalidArgument, error
    else:
        # Not a timeout, with which the group would have ended.
        assert type(error) is peerlane.Aborted and error.rank == 1, error
        assert "rank 1 failed (invalid argument)" in str(error)
    group.check()
    return call(good)


def calls_that_exchange(group):
    size, window = group.size, group.window(64)
    refused(group, "nbytes is 'x'", group.window, 64, "x")
    refused(group, "nbytes is -1", group.window, 64, -1)
    refused(group, "nbytes is 2.5", group.reserve, 1 << 16, 2.5)
    refused(group, "color is -1", group.split, 0, -1)
    refused(group, "key is None", lambda key: group.split(0, key), 0, None)
    refused(group, "ranks is 5", group.subgroup, range(size), 5)
    refused(group, "ranks", group.subgroup, range(size), [1 << 32])
    refused(group, "data is 'text'", group.exchange, b"data", "text")
    # Memory of NumPy cannot be mapped by other processes, so the right call fails, too: on all ranks.
    with pytest.raises(peerlane.Error, match="cannot be imported"):
        refused(group, "array is a list", group.window_over, numpy.ones(4), [1])

    def prepare(options):
        collective, dtype, count = (
            options.pop(name, value) for name, value in [("collective", "all-reduce"), ("dtype", "f32"), ("count", 3)]
        )
        group.prepare(collective, dtype, count, **options).run()

    for options, word in [({"collective": "all-sum"}, "collective is"), ({"collective": 3}, "collective is 3"), ({"dtype": "f31"}, "dtype is 'f31'"),
                          ({"count": -1}, "count is -1"), ({"count": 2.5}, "count is 2.5"), ({"root": -1}, "root is -1"),
                          ({"reduction": "product"}, "reduction is"), ({"algorithm": "guess"}, "algorithm"), ({"chunks": -1}, "chunks is -1"),
                          ({"timeout": -1}, "timeout is -1"), ({"in_place": 3}, "in_place is 3"), ({"strict": "x"}, "strict is 'x'"),
                          ({"beside_compute": 1}, "beside_compute is 1"),
                          ({"input": window}, "input is"), ({"output": (window, -1)}, "output is -1"), ({"output": (window, 1000)}, "the range is 1000..1003"),
                          ({"matrix": 5}, "matrix is 5")]:  # fmt: skip
        refused(group, word, prepare, {}, options)

    memory = window.memory() if group.rank == 1 else None
    with pytest.raises(peerlane.Error, match="1 arrays or tensors of the window are in use"):
        group.release(window)
    del memory
    refused(group, "window is 5", group.release, window, 5)
    refused(group, "the window was released", group.release, group.window(8), window)


def test_calls_in_which_ranks_exchange_messages():
    peerlane.spawn(calls_that_exchange, 3)


def calls_on_arrays(group):
    size = group.size
    source, ones, all = numpy.ones(4, "float32"), numpy.ones(4 * size, "float32"), numpy.zeros(4 * size, "float32")
    # The first call of each collective, in which all ranks prepare an operation.
    refused(group, "output has 3 elements", lambda output: group.all_gather(source, output), all, all[:3].copy())
    refused(group, "contiguous", lambda array: group.broadcast(array), source, numpy.ones((4, 4), "float32")[:, 0])
    refused(group, "elements of f64", lambda output: group.all_to_all(ones, output), all, all.astype("float64"))
    refused(group, "input is a list", lambda input: group.gather(input, all), source, [1])
    refused(group, "counts is [1]", lambda counts: group.scatter(ones, numpy.zeros(4, "float32"), counts=counts), [4] * size, [1])
    refused(group, "reduction is 3", lambda reduction: group.reduce_scatter(ones, source, reduction), "sum", 3)
    refused(group, "root is 99", lambda root: group.reduce(source, all[:4], root=root), 0, 99)
    refused(group, "beside_compute is 1", lambda beside: group.scan(source, beside_compute=beside), True, 1)
    refused(group, "stream is given", lambda stream: group.all_reduce(source, stream=stream), None, 1)
    # Ranks always tell each other the splits.
    splits = [4] * size
    for wrong in (5, [-1] * size, [4] * (size + 1)):
        refused(group, "splits", lambda send: group.all_to_all(ones, all, splits=(send, splits)), splits, wrong)


def test_the_first_call_of_a_collective_on_arrays():
    peerlane.spawn(calls_on_arrays, 3)


def memory_for_copies_is_kept(group):
    source = numpy.ones(4)
    assert group.broadcast(source).tolist() == [1.0] * 4
    kept = group.report()["operations"]["kept"]
    # Others would replace the memory for copies of the broadcast by a larger one.
    large = numpy.ones(1 << 16)
    total = refused(group, "is a list", lambda input: group.all_reduce(input, numpy.empty(1 << 16)), large, [1])
    assert (total == group.size).all() and group.report()["operations"]["kept"] >= kept
    assert group.broadcast(source).tolist() == [1.0] * 4


def test_a_refusal_changes_nothing_on_other_ranks():
    peerlane.spawn(memory_for_copies_is_kept, 3)


def kept_operations(group):
    source, all = numpy.full(4, group.rank), numpy.zeros(4 * group.size, int)
    group.all_gather(source, all)
    if group.rank == 1:
        # The others start an operation that they keep, and wait for the right call of this rank.
        with pytest.raises(peerlane.InvalidArgument, match="output has 3 elements"):
            group.all_gather(source, all[:3].copy())
    assert group.all_gather(source, all).tolist() == numpy.repeat(range(group.size), 4).tolist()


def test_a_refused_start_can_be_made_again():
    peerlane.spawn(kept_operations, 3)


def refused_for_good(group, refused):
    source, all = numpy.ones(4), numpy.zeros(4 * group.size)
    group.all_gather(source, all)
    begun = time.monotonic()
    # Of the ranks that have not come when the timeout passes, the first is named, also if another one is late.
    if group.rank == 0:
        with pytest.raises(peerlane.InvalidArgument, match="output has 3 elements"):
            group.all_gather(source, all[:3].copy())
        open(refused, "x").close()
        with pytest.raises(peerlane.Error, match="refused its last call"):
            while time.monotonic() < begun + 60:
                group.check()
                time.sleep(0.01)
    else:
        while not os.path.exists(refused):
            assert time.monotonic() < begun + 60
            time.sleep(0.01)
        with pytest.raises(peerlane.Error, match="refused its last call: .*output has 3 elements, expected 12") as caught:
            group.all_gather(source, all)
        assert caught.value.rank == 0
    group.abandon()


def test_ranks_that_wait_for_a_refused_start_learn_why(tmp_path):
    # It is also that of the first call, in which all ranks prepare an operation.
    peerlane.spawn(refused_for_good, 3, str(tmp_path / "refused"), timeout=5)


def splits_after_other_calls(group):
    ones, all = numpy.ones(group.size), numpy.zeros(group.size)
    # `empty` has begun an exchange that is still in progress.
    arrays = [group.empty(1 << 18) for _ in range(4)]
    refused(group, "nbytes is -1", group.window, 64, -1)
    refused(group, "splits", lambda send: group.all_to_all(ones, all, splits=(send, [1] * group.size)), [1] * group.size, 7)
    assert len(arrays) == 4


def test_refusals_follow_an_exchange_in_progress():
    peerlane.spawn(splits_after_other_calls, 3)


def closed_group(group):
    group.close()
    with pytest.raises(peerlane.InvalidArgument, match="nbytes is -1"):
        group.window(-1)
    with pytest.raises(peerlane.InvalidArgument, match="is a list"):
        group.all_reduce([1])


def test_a_closed_group_refuses_without_the_others():
    peerlane.spawn(closed_group, 2)

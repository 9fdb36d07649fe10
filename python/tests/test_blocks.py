"""Starts whose blocks arrive and depart one after the other, on the host."""

import numpy
import pytest

import peerlane

STARTS = 4
COUNT = 500


def value(sender, receiver, start):
    return 100 * start + 10 * sender + receiver


def gather(group):
    with pytest.raises(peerlane.InvalidArgument, match="arrivals"):
        group.prepare("reduce-scatter", "i32", COUNT, arrivals=True)
    operation = group.prepare("all-gather", "i32", COUNT, arrivals=True)
    others = [block for block, _ in operation.arrivals if block != group.rank]
    assert sorted(block for block, _ in operation.arrivals) == list(range(group.size))
    for start in range(STARTS):
        numpy.asarray(operation.input)[:] = value(group.rank, 0, start)
        future = operation.start()
        for block in others:
            seen = numpy.asarray(future.wait_block(block, timeout=20))
            assert numpy.array_equal(seen, [value(block, 0, start)] * COUNT)
        with pytest.raises(peerlane.InvalidArgument, match="no block 9 arrives on this rank"):
            future.wait_block(9)
        future.wait()
    with pytest.raises(peerlane.InvalidArgument, match="no streams"):
        operation.start_beside(1)


def exchange(group):
    operation = group.prepare("all-to-all", "i32", COUNT, arrivals=True, departures=True)
    for start in range(STARTS):
        blocks = numpy.asarray(operation.input).reshape(group.size, COUNT)
        arrivals, departures = operation.arrivals, operation.departures
        future = operation.start()
        for receiver, chunk in departures:
            blocks[receiver] = value(group.rank, receiver, start)
            future.depart(receiver, chunk)
            with pytest.raises(peerlane.InvalidArgument, match="has departed already"):
                future.depart(receiver)
        for sender, chunk in arrivals:
            seen = numpy.asarray(future.wait_block(sender, chunk))
            assert numpy.array_equal(seen, [value(sender, group.rank, start)] * COUNT)
        future.wait()


def reduce(group):
    operation = group.prepare("reduce-scatter", "i32", COUNT, departures=True)
    for start in range(STARTS):
        blocks = numpy.asarray(operation.input).reshape(group.size, COUNT)
        departures = operation.departures
        future = operation.start()
        for receiver, _ in departures:
            blocks[receiver] = value(group.rank, receiver, start)
            future.depart(receiver)
        total = sum(value(sender, group.rank, start) for sender in range(group.size))
        assert numpy.array_equal(numpy.asarray(future.wait()), [total] * COUNT)


@pytest.mark.parametrize("body", [gather, exchange, reduce])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_blocks_arrive_and_depart_one_after_the_other(body, ranks):
    peerlane.spawn(body, ranks)

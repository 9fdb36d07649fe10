"""The intent `beside_compute` of groups and operations, which ranks compare by value."""

import numpy
import pytest

import peerlane

DIFFERS = "beside_compute is false on rank 1, true on rank 0"


def prepared(group, beside_compute):
    gather = group.prepare("all-gather", "i64", 1, beside_compute=beside_compute)
    numpy.asarray(gather.input)[:] = group.rank
    gather.run()
    assert numpy.asarray(gather.output).tolist() == list(range(group.size))
    gather.drop()


def of_operations(group):
    is_first = group.rank == 0
    for beside_compute in (True, False, None):
        prepared(group, beside_compute)

    # Without a setting, an operation has that of its group.
    prepared(group, None if is_first else False)
    with pytest.raises(peerlane.Mismatch, match=DIFFERS):
        prepared(group, True if is_first else None)

    # The group goes on.
    prepared(group, True)


def test_of_operations():
    peerlane.spawn(of_operations, 2)


def of_a_group(group):
    is_first = group.rank == 0
    part = group.split(0)
    for one in (group, part, group.subgroup(range(group.size))):
        prepared(one, None if is_first else True)
        prepared(one, False)
        with pytest.raises(peerlane.Mismatch, match=DIFFERS):
            prepared(one, None if is_first else False)

        one.all_reduce(numpy.ones(4), beside_compute=None if is_first else True)
        with pytest.raises(peerlane.Mismatch, match=DIFFERS):
            one.reduce(numpy.ones(4), numpy.ones(4), beside_compute=None if is_first else False)


def test_of_a_group_and_its_subgroups():
    peerlane.spawn(of_a_group, 2, beside_compute=True)


CALLS = {
    "all_gather": lambda group, few, many, **options: group.all_gather(few, many, **options),
    "broadcast": lambda group, few, many, **options: group.broadcast(few, **options),
    "all_to_all": lambda group, few, many, **options: group.all_to_all(many, many.copy(), **options),
    "gather": lambda group, few, many, **options: group.gather(few, many, **options),
    "scatter": lambda group, few, many, **options: group.scatter(many, few, **options),
    "reduce_scatter": lambda group, few, many, **options: group.reduce_scatter(many, few, **options),
    "all_reduce": lambda group, few, many, **options: group.all_reduce(few, **options),
    "reduce": lambda group, few, many, **options: group.reduce(few, few.copy(), **options),
    "scan": lambda group, few, many, **options: group.scan(few, **options),
    "exscan": lambda group, few, many, **options: group.exscan(few, few.copy(), **options),
}


def of_calls(group):
    few, many = numpy.ones(4), numpy.ones(4 * group.size)
    for name, call in CALLS.items():
        with pytest.raises(peerlane.Mismatch, match=DIFFERS):
            call(group, few, many, beside_compute=group.rank == 0)

        # An operation is kept for each of both, and a call without a setting has that of the group.
        before = group.report()["operations"]
        for beside_compute in (True, False, None, True, False):
            call(group, few, many, beside_compute=beside_compute)
        after = group.report()["operations"]
        prepared, hits = after["misses"] - before["misses"], after["hits"] - before["hits"]
        assert (prepared, hits) == (2, 3), (name, prepared, hits)


def test_of_calls_on_arrays():
    peerlane.spawn(of_calls, 2)


def test_every_collective_is_called():
    from peerlane import _native

    assert sorted(CALLS) == sorted(name.replace("-", "_") for name in _native.Goal.names())

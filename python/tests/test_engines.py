"""The kind of engines of groups and operations, which ranks compare by value."""

import numpy
import pytest

import peerlane


def report_of(group, **options):
    total = group.prepare("all-reduce", "f32", 8, **options)
    numpy.asarray(total.input)[:] = group.rank
    total.run()
    assert numpy.asarray(total.output).tolist() == [sum(range(group.size))] * 8
    report = total.report()
    total.drop()
    return report


def of_operations(group):
    (kind,) = group.engines
    for engine in (None, kind):
        report = report_of(group, engine=engine)
        assert (report["kind"], report["form"], report["refused_kinds"]) == (kind, "whole", [])

    with pytest.raises(peerlane.InvalidArgument, match=f'engine is "warp", expected a kind that all ranks offer: {kind}'):
        report_of(group, engine="warp")
    with pytest.raises(peerlane.InvalidArgument):
        group.prepare("all-gather", "f32", 8, engine=7)
    assert group.split(0).engines == [kind]


def test_of_operations():
    peerlane.spawn(of_operations, 3)


def of_a_group(group):
    assert report_of(group)["kind"] == "processor"


def test_of_a_group():
    peerlane.spawn(of_a_group, 2, engine="processor")
    with pytest.raises(peerlane.Error, match='engine is "warp"'):
        peerlane.spawn(of_a_group, 2, engine="warp")

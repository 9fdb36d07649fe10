"""Ranks that make calls in different orders learn so long before the timeout, with both calls."""

import time

import pytest

import peerlane

TIMEOUT = 60


def crossed(group):
    gather = group.prepare("all-gather", "f32", 4, label="weights")
    begun = time.monotonic()
    with pytest.raises(peerlane.Mismatch) as caught:
        if group.rank == 0:
            gather.run()
        else:
            group.prepare("all-to-all", "f32", 4)
    assert time.monotonic() - begun < TIMEOUT / 2
    text = str(caught.value)
    assert 'start 1 of all-gather 1 "weights"' in text and 'the call "all-to-all 2"' in text, text
    assert "ranks call in different orders: rank 0 waits in" in text, text
    # The group has ended, and cannot be closed together.
    group.abandon()


def late(group):
    gather = group.prepare("all-gather", "f32", 4)
    for rank in range(group.size):
        if group.rank == rank:
            time.sleep(0.8)
        gather.run()
        if group.rank == rank:
            time.sleep(0.8)
        group.barrier()


def test_calls_in_different_orders_are_a_mismatch():
    peerlane.spawn(crossed, 2, timeout=TIMEOUT)


def test_late_ranks_are_no_mistake():
    peerlane.spawn(late, 3, timeout=TIMEOUT)

"""Prints the median time of a start of an all-gather of 8 bytes on one rank, in nanoseconds, to compare with capi/examples/start_time.rs."""

import statistics
import time

import numpy

import peerlane

STARTS = 10_000


def median(call):
    times = []
    for _ in range(STARTS):
        begun = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - begun)
    return statistics.median(times)


with peerlane.init(backend="host") as group:
    gather = group.prepare("all-gather", "u8", 8)
    source, target = numpy.zeros(8, "uint8"), numpy.zeros(8, "uint8")
    own_source, own_target = group.empty(8, "uint8"), group.empty(8, "uint8")
    print(f"the clock itself {median(lambda: None):.0f}")
    print(f"prepared, run() {median(gather.run):.0f}")
    print(f"prepared, start() and wait() {median(lambda: gather.start().wait()):.0f}")
    print(f"all_gather of arrays of empty() {median(lambda: group.all_gather(own_source, own_target)):.0f}")
    print(f"all_gather of other arrays {median(lambda: group.all_gather(source, target)):.0f}")

"""What a process does that was forked from a rank: it can end in every way, and each call of the library is an error there."""

import contextlib
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import numpy
import pytest

import peerlane

FORKED = "this process was forked from one that uses Peerlane"
# What the functions of pools find in their processes.
KEPT = []


def ended(child, seconds=20):
    """Waits for a process and returns its exit status."""
    deadline = time.monotonic() + seconds
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid == child:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError("the forked process does not end")
        time.sleep(0.005)


@contextlib.contextmanager
def errors_to(path):
    """Writes what this process and its children write to stderr to a file."""
    kept = os.dup(2)
    with open(path, "wb") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)


def objects(group):
    """Returns objects of all kinds, of which none is in use."""
    window = group.window(64)
    gather = group.prepare("all-gather", "i64", 3)
    array = group.empty(3, "i64")
    return window, gather, array, numpy.asarray(gather.input), group.split(0)


def add_up(group, rounds):
    for number in range(rounds):
        array = numpy.full(5, number + group.rank)
        assert group.all_reduce(array).tolist() == [sum(number + rank for rank in range(group.size))] * 5


# A forked process ends


def exits(group, folder, with_start):
    kept = objects(group)
    gather = group.prepare("all-gather", "i64", 2)
    with errors_to(f"{folder}/errors-{group.rank}"):
        future = gather.start() if with_start else None
        child = os.fork()
        if child == 0:
            time.sleep(0.2)
            # Through the `with` block of the group, and the functions at the end of the interpreter.
            sys.exit(7)

        if future is not None:
            future.wait()
        add_up(group, 100)
        assert ended(child) == 7
    add_up(group, 3)
    numpy.asarray(gather.input)[:] = group.rank
    gather.run()
    assert numpy.asarray(gather.output).tolist() == [0, 0, 1, 1]
    assert len(kept) == 5
    kept[-1].close()
    return open(f"{folder}/errors-{group.rank}").read()


@pytest.mark.parametrize("with_start", [False, True])
def test_a_forked_process_exits_while_its_parent_goes_on(tmp_path, with_start):
    assert peerlane.spawn(exits, 2, str(tmp_path), with_start) == ["", ""]


PROGRAM = """
import os, sys, peerlane
group = peerlane.init(backend="host")
future = group.prepare("all-gather", "f32", 4).start()
child = os.fork()
if child == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
future.wait()
"""


def test_a_forked_process_says_nothing_of_the_starts_of_its_parent():
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, cwd=os.path.dirname(__file__))
    assert (ended.returncode, ended.stderr) == (0, "")


def leaves_many(group):
    kept = objects(group)
    for _ in range(10):
        child = os.fork()
        if child == 0:
            del kept
            gc.collect()
            group.abandon()
            os._exit(0)
        add_up(group, 2)
        assert ended(child) == 0
    kept[-1].close()


def test_objects_that_forked_processes_drop_stay_with_the_parent():
    peerlane.spawn(leaves_many, 2)


def drops_what_a_thread_uses(group, all_ended):
    gather = group.prepare("all-gather", "i64", 3)
    if group.rank == 1:
        while not os.path.exists(all_ended):
            time.sleep(0.01)
        gather.run()
        return
    thread = threading.Thread(target=gather.run)
    thread.start()
    for _ in range(10):
        time.sleep(0.01)
        child = os.fork()
        if child == 0:
            gather.drop()
            group.abandon()
            del gather, group
            gc.collect()
            os._exit(0)
        assert ended(child) == 0
    open(all_ended, "w").close()
    thread.join()


def test_a_forked_process_drops_what_a_thread_of_its_parent_uses(tmp_path):
    peerlane.spawn(drops_what_a_thread_uses, 2, str(tmp_path / "ended"))


# A forked process calls the library


def calls_of(group, kept, future):
    """Returns calls that need the library."""
    window, gather, array, _, part = kept
    return {
        "barrier": group.barrier,
        "check": group.check,
        "exchange": lambda: group.exchange(b""),
        "split": lambda: group.split(0),
        "subgroup": lambda: group.subgroup([group.rank]),
        "shrink": group.shrink,
        "prepare": lambda: group.prepare("all-gather", "i64", 3),
        "window": lambda: group.window(64),
        "window_over": lambda: group.window_over(numpy.zeros(8)),
        "window_over_descriptor": lambda: group.window_over_descriptor(0, 8),
        "release": lambda: group.release(window),
        "empty": lambda: group.empty(1 << 20),
        "reserve": lambda: group.reserve(1 << 30),
        "all_reduce": lambda: group.all_reduce(array),
        "all_gather": lambda: group.all_gather(array, numpy.zeros(3 * group.size, "i8")),
        "run": gather.run,
        "start": gather.start,
        "wait": future.wait,
        "done": future.done,
        "input": lambda: gather.input,
        "report": gather.report,
        "close part": part.close,
        "close": group.close,
        "open": lambda: peerlane.open(backend="host"),
        "hub": lambda: peerlane.Hub("127.0.0.1:0", 1),
    }


def calls(group):
    kept = objects(group)
    started = group.prepare("all-gather", "i64", 2)
    future = started.start()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        outcomes = []
        for name, call in calls_of(group, kept, future).items():
            try:
                call()
                outcomes.append(f"{name} succeeds")
            except peerlane.InvalidArgument as error:
                if FORKED not in str(error):
                    outcomes.append(f"{name}: {error}")
            except BaseException as error:
                outcomes.append(f"{name}: {error!r}")
        os.write(writer, "\n".join(outcomes).encode())
        os._exit(0)

    os.close(writer)
    future.wait()
    add_up(group, 20)
    status = ended(child)
    kept[-1].close()
    with open(reader, "rb") as said:
        return status, said.read().decode()


def test_each_call_in_a_forked_process_is_an_error():
    assert peerlane.spawn(calls, 2) == [(0, "")] * 2


# Pools


def drop_all(number):
    KEPT.clear()
    gc.collect()
    with contextlib.suppress(peerlane.InvalidArgument):
        peerlane.group().barrier()
        return "a barrier succeeds"
    return number * number


def with_pool(group):
    KEPT.extend([group, *objects(group)])
    started = group.prepare("all-gather", "i64", 2)
    future = started.start()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        squares = pool.map_async(drop_all, range(6))
        future.wait()
        add_up(group, 20)
        squares = squares.get(20)
        pool.close()
        pool.join()
    add_up(group, 20)
    KEPT.pop().close()
    KEPT.clear()
    return squares


def test_a_pool_of_forked_processes_runs_in_a_rank():
    assert peerlane.spawn(with_pool, 2) == [[0, 1, 4, 9, 16, 25]] * 2

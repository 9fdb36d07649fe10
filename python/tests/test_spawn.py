"""What `spawn` does with processes: their environment, their children, their ends and their failures."""

import concurrent.futures
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest

import peerlane
from peerlane._spawn import JOIN_VARIABLES

FOLDER = os.path.dirname(__file__)
ENVIRONMENT_SOURCE = Path(FOLDER, "../../bootstrap/src/environment.rs")
METHODS = ["spawn", "fork", "forkserver"]


def square(number):
    return number * number


def rank_of(group):
    return group.rank


# Processes that ranks start


def with_pools(group):
    squares = []
    for method in METHODS:
        with multiprocessing.get_context(method).Pool(1) as pool:
            squares.append(pool.map(square, range(3)))
        group.barrier()
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        squares.append(list(executor.map(square, range(3))))
    total = group.all_reduce(numpy.ones(2))
    return squares, total.tolist()


def test_ranks_start_processes():
    assert peerlane.spawn(with_pools, 2) == [([[0, 1, 4]] * 4, [2, 2])] * 2


def returns_twice(group, closes):
    if closes:
        group.close()
    child = os.fork()
    if child != 0:
        os.waitpid(child, 0)
        time.sleep(0.05)
    return group.rank if child != 0 else "forked"


@pytest.mark.parametrize("closes", [False, True])
def test_a_forked_process_that_returns_is_no_rank(closes):
    assert peerlane.spawn(returns_twice, 2, closes) == [0, 1]


def killed_with_a_child(group, child_file):
    if group.rank == 1:
        child = os.fork()
        if child == 0:
            time.sleep(100)
            os._exit(0)
        Path(child_file).write_text(str(child))
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)


def test_the_end_of_a_rank_is_noticed_while_its_child_runs(tmp_path):
    with pytest.raises(peerlane.Error, match="rank 1 failed: the process ended with status -9"):
        peerlane.spawn(killed_with_a_child, 2, str(tmp_path / "child"))
    child = int((tmp_path / "child").read_text())
    assert is_running(child)
    os.kill(child, signal.SIGKILL)


# Environment


SIZE_OF_A_GROUP = "import peerlane; print(peerlane.init(backend='host').size)"


def environment(group):
    group.barrier()
    names = sorted(name for name in os.environ if name.startswith(("PEERLANE_", "SLURM_")) or name in FOREIGN)
    size = subprocess.run([sys.executable, "-c", SIZE_OF_A_GROUP], capture_output=True, text=True, cwd=FOLDER)
    return group.size, names, size.stdout.strip() or size.stderr


FOREIGN = {
    "RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "192.0.2.7", "MASTER_PORT": "1",
    "TORCHELASTIC_RUN_ID": "run", "OMPI_COMM_WORLD_RANK": "7", "MV2_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3", "PMI_RANK": "x", "PMIX_NAMESPACE": "job",
    "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "12", "PEERLANE_HUB": "192.0.2.7:1",
    "PEERLANE_PORT": "70000", "PEERLANE_JOB_ID": "x" * 300, "PEERLANE_SECRET": "short", "PEERLANE_SECRET_FILE": "/nothing",
    "PEERLANE_OTHER": "passes",
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_ranks_have_a_clean_environment(method):
    program = f"import peerlane, test_spawn; print(peerlane.spawn(test_spawn.environment, 2, method={method!r}))"
    ended = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | FOREIGN, cwd=FOLDER, capture_output=True, text=True, timeout=60
    )
    expected = [(2, ["PEERLANE_OTHER", "SLURM_JOB_ID"], "1")] * 2
    assert ended.stdout.strip() == str(expected), ended.stderr


def test_the_list_of_variables_has_those_of_the_library():
    source = ENVIRONMENT_SOURCE.read_text().split("#[cfg(test)]")[0]
    # Names without an underscore are also those of launchers. The id of a job says nothing about ranks.
    read = set(re.findall(r'"([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)"', source)) | {"RANK"}
    read -= {"SLURM_JOB_ID", "FLUX_JOB_ID"}
    assert "WORLD_SIZE" in read and "PEERLANE_HUB" in read and len(read) > 20
    for name in sorted(read):
        assert any(name == known or (known.endswith("*") and name.startswith(known[:-1])) for known in JOIN_VARIABLES), name


def test_many_calls_at_once_do_not_meet():
    with concurrent.futures.ThreadPoolExecutor(3) as executor:
        calls = [executor.submit(peerlane.spawn, rank_of, 2) for _ in range(3)]
        assert [call.result() for call in calls] == [[0, 1]] * 3


# The end of the parent


def note_pid(group, folder):
    Path(folder, f"new-{group.rank}").write_text(str(os.getpid()))
    os.rename(Path(folder, f"new-{group.rank}"), Path(folder, f"pid-{group.rank}"))
    time.sleep(600)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(condition, what):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_no_rank_survives_its_parent(tmp_path):
    program = "import sys, peerlane, test_spawn; peerlane.spawn(test_spawn.note_pid, 2, sys.argv[1], method=sys.argv[2])"
    parents = {}
    for method in METHODS:
        folder = tmp_path / method
        folder.mkdir()
        parents[folder] = subprocess.Popen([sys.executable, "-c", program, str(folder), method], cwd=FOLDER)

    pids = []
    for folder, parent in parents.items():
        files = [folder / f"pid-{rank}" for rank in range(2)]
        # However long the interpreters take to start: the parent ends if its ranks do not.
        while not all(file.exists() for file in files):
            assert parent.poll() is None, f"{folder.name}: the ranks do not start"
            time.sleep(0.01)
        pids += [(folder.name, int(file.read_text())) for file in files]
        parent.kill()
        parent.wait()
    for method, pid in pids:
        until(lambda pid=pid: not is_running(pid), f"{method}: rank {pid} runs on")


# Failures


class Odd(Exception):
    """An exception that cannot be unpickled."""

    def __init__(self, first, second):
        super().__init__(first)
        self.second = second


def fails(group, how):
    if group.rank == 1:
        if how == "result":
            return lambda: 1
        if how == "odd result":
            return Odd(1, 2)
        if how == "odd error":
            raise Odd("cause", 2)
        if how == "exit":
            sys.exit(3)
        os._exit(4)
    if how != "odd result":
        group.barrier()
    return None


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("result", "Can't pickle local object"),
        ("odd result", "its result cannot be unpickled: .*missing 1 required positional argument: 'second'"),
        ("odd error", "Odd: cause"),
        ("exit", "SystemExit: 3"),
        ("end", "the process ended with status 4"),
    ],
)
def test_the_rank_that_fails_is_named(how, text):
    with pytest.raises(peerlane.Error, match=f"(?s)^rank 1 failed: .*{text}") as caught:
        peerlane.spawn(fails, 2, how)
    assert caught.value.rank == 1


def big(group):
    return numpy.full(30 << 20, group.rank, "u1")


def test_results_can_be_big():
    assert [(result.nbytes, result[-1]) for result in peerlane.spawn(big, 2)] == [(30 << 20, 0), (30 << 20, 1)]


def in_worker(function):
    return peerlane.spawn(function, 2)


def test_arguments_that_are_wrong():
    with pytest.raises(peerlane.InvalidArgument, match=r"cannot be sent to a process: .*<lambda>.*expected a function of the top level"):
        peerlane.spawn(lambda group: group.rank, 2)
    with pytest.raises(peerlane.InvalidArgument, match="cannot be sent to a process: .*cannot pickle"):
        peerlane.spawn(rank_of, 2, open(__file__))
    for option in ("hub", "rank", "ranks", "secret"):
        with pytest.raises((peerlane.InvalidArgument, TypeError), match=option):
            peerlane.spawn(rank_of, 2, **{option: 1})
    with pytest.raises(peerlane.InvalidArgument, match="start_timeout is 'long'"):
        peerlane.spawn(rank_of, 2, start_timeout="long")


def test_workers_of_pools_call_spawn():
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool, pytest.raises(peerlane.InvalidArgument, match="spawn was called in a daemonic process"):
        pool.apply(in_worker, (rank_of,))
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
        assert executor.submit(in_worker, rank_of).result() == [0, 1]

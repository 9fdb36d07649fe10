"""Runs a function as ranks on this machine, for tests and notebooks.

Rank 0 opens the hub at a port that the system chooses, so the parent does not use the native module: it can fork ranks any number of times, and
no two calls compete for a port. The parent passes the address on to the other ranks.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.connection
import os
import pickle
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from fnmatch import fnmatchcase
from multiprocessing.reduction import ForkingPickler
from typing import Any

from peerlane._arguments import limit, shown, whole
from peerlane._errors import Error, InvalidArgument, Timeout, names_call

# What says how a process joins a group, by the names that `bootstrap/src/environment.rs` reads, and what else launchers set for one rank.
# `SLURM_JOB_ID` is none of these: without a step, it names no group.
JOIN_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_*",
    "OMPI_COMM_WORLD_*", "OMPI_MCA_ess_*", "PMIX_*", "PMI_*", "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_*", "PALS_*", "FLUX_TASK_*", "FLUX_JOB_SIZE", "FLUX_JOB_NNODES", "JSM_NAMESPACE_*",
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_*",
    "PEERLANE_HUB", "PEERLANE_PORT", "PEERLANE_JOB_ID", "PEERLANE_SECRET", "PEERLANE_SECRET_FILE", "PEERLANE_ALLOW_UNAUTHENTICATED",
)  # fmt: skip
# The options of `open` that `spawn` sets itself.
_OWN_OPTIONS = ("hub", "rank", "ranks", "secret")
_START_TIMEOUT = 120.0
# How long the other ranks have to say whom they lost, after the first of them has lost a rank.
_BLAME_SECONDS = 2.0
# How long ranks have to end by themselves.
_END_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1


@names_call
def spawn(function: Callable[..., Any], ranks: int, *args: Any, method: str | None = None, **options: Any) -> list[Any]:
    """Calls `function(group, *args)` in `ranks` processes of this machine, and returns the results in rank order.

    `options` are those of `peerlane.open`; the default backend is "host". `method` is that of `multiprocessing`: "spawn", or, if the function was defined in
    a notebook, "fork", which needs a parent that has not used Peerlane or a GPU. `peerlane.group()` returns the group in the function.

    The environment of the ranks has no variables of launchers, nor those of Peerlane that say how a process joins a group. Ranks may start processes, which
    are no ranks of the group. If this process ends, the ranks are killed.

    Raises `peerlane.Error` with the traceback of the first rank that has failed; the others are ended.
    """
    ranks = whole("ranks", ranks, 1)
    for name in _OWN_OPTIONS:
        if name in options:
            raise InvalidArgument(f"{name} is an option, expected none of {', '.join(_OWN_OPTIONS)}: spawn opens a hub of its own")
    given = options.get("start_timeout")
    address_timeout = _START_TIMEOUT if given is None else limit("start_timeout", given)
    if multiprocessing.current_process().daemon:
        raise InvalidArgument(
            "spawn was called in a daemonic process, such as a worker of multiprocessing.Pool, which may not start processes; "
            "call it in another process, such as a worker of concurrent.futures.ProcessPoolExecutor"
        )

    if method is None:
        is_interactive = getattr(function, "__module__", None) == "__main__" and not hasattr(sys.modules["__main__"], "__file__")
        method = "fork" if is_interactive else "spawn"
    if method not in (methods := multiprocessing.get_all_start_methods()):
        raise InvalidArgument(f"method is {shown(method)}, expected one of {', '.join(methods)}")
    context = multiprocessing.get_context(method)
    options.setdefault("backend", "host")
    secret = secrets.token_hex(32)

    started: list[_Rank] = []
    is_complete = False
    try:
        for number in range(ranks):
            membership = {"rank": number, "ranks": ranks, "secret": secret}
            started.append(_Rank(context, membership, address_timeout, function, args, options))
        results = _results(started)
        is_complete = True
    finally:
        _end(started, kills=not is_complete)
    return results


class _Rank:
    """The process of a rank, as its parent sees it."""

    def __init__(self, context: Any, membership: dict, *arguments: Any):
        self.number: int = membership["rank"]
        self.pipe, theirs = context.Pipe()
        try:
            # Not a daemon, because these may not start processes.
            self.process = context.Process(target=_run, args=(theirs, os.getpid(), membership, *arguments), daemon=False)
            self.process.start()
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            self.pipe.close()
            text = (
                f"the function and its arguments cannot be sent to a process: {error}; "
                'expected a function of the top level of a module, and arguments that pickle accepts, or method="fork"'
            )
            raise InvalidArgument(text) from error
        finally:
            theirs.close()
        self.end = _descriptor_of_end(self.process)

    def message(self) -> tuple:
        """Returns the next message: the address of the hub, the result, or a failure. Call it if the pipe or the descriptor is ready."""
        # A process that the rank has started may hold the other end of the pipe, so there is not always an end of file.
        try:
            if self.pipe.poll():
                return self.pipe.recv()
        except (EOFError, OSError):
            pass
        self.process.join()
        return "failed", f"the process ended with status {self.process.exitcode}", None

    def send(self, message: Any) -> None:
        """Sends a message, unless the rank has ended, which is noticed elsewhere."""
        try:
            self.pipe.send(message)
        except OSError:
            pass


def _descriptor_of_end(process: Any) -> int:
    """Returns a descriptor that is readable when a process has ended, even if processes that it has started go on."""
    try:
        return os.pidfd_open(process.pid)
    except OSError:  # such as in a sandbox
        return os.dup(process.sentinel)


def _results(ranks: list[_Rank]) -> list[Any]:
    """Returns the results of all ranks, or raises the error of the rank that is the cause of the others' failures."""
    results: list[Any] = [None] * len(ranks)
    failures: dict[int, tuple[str, int | None]] = {}
    waiting = set(ranks)
    while waiting and _cause(failures) is None:
        # A rank that fails because of another one may be heard first.
        events = [event for rank in waiting for event in (rank.pipe, rank.end)]
        ready = multiprocessing.connection.wait(events, _BLAME_SECONDS if failures else None)
        if not ready:
            break

        for rank in [rank for rank in waiting if rank.pipe in ready or rank.end in ready]:
            kind, value, *blamed = rank.message()
            if kind == "hub":
                for other in ranks:
                    if other is not rank:
                        other.send(value)
                continue

            waiting.remove(rank)
            if kind == "failed":
                failures[rank.number] = value, blamed[0]
                continue
            try:
                results[rank.number] = pickle.loads(value)
            except Exception:
                text = "".join(traceback.format_exc()).rstrip()
                failures[rank.number] = f"its result cannot be unpickled: {text}", None

    if failures:
        number = _cause(failures)
        number = min(failures) if number is None else number
        failure = Error(f"rank {number} failed: {failures[number][0]}")
        failure.rank = number
        raise failure
    return results


def _cause(failures: dict[int, tuple[str, int | None]]) -> int | None:
    """Returns a rank that failed for a reason of its own."""
    return next((rank for rank, (_, blamed) in failures.items() if blamed in (None, rank)), None)


def _end(ranks: list[_Rank], kills: bool) -> None:
    """Waits until the processes of ranks have ended: with `kills` they are told to, and after some seconds they must."""
    if kills:
        for rank in ranks:
            rank.process.terminate()

    deadline = time.monotonic() + _END_SECONDS
    for rank in ranks:
        multiprocessing.connection.wait([rank.end], max(0, deadline - time.monotonic()))
        if rank.process.is_alive():
            rank.process.kill()
        rank.process.join()
        rank.pipe.close()
        os.close(rank.end)


# In the process of a rank


def _run(
    pipe: Any, parent: int, membership: dict, address_timeout: float, function: Callable[..., Any], args: tuple, options: dict
) -> None:
    """Opens the group, calls the function and sends its result to the parent."""
    own = os.getpid()
    _end_with(parent)
    # A process that this one forks must not hold the pipe, of which the parent awaits the end if this one is killed.
    os.register_at_fork(after_in_child=pipe.close)
    for name in list(os.environ):
        if any(fnmatchcase(name, pattern) for pattern in JOIN_VARIABLES):
            del os.environ[name]

    try:
        message = "done", _result(pipe, membership, address_timeout, function, args, options)
    except BaseException as error:
        if os.getpid() != own:
            raise
        blamed = error.rank if isinstance(error, Error) else None
        message = "failed", "".join(traceback.format_exception(error)).rstrip(), blamed

    # A process that the function has forked is no rank.
    if os.getpid() == own:
        pipe.send(message)
        pipe.close()


def _result(pipe: Any, membership: dict, address_timeout: float, function: Callable[..., Any], args: tuple, options: dict) -> bytes:
    """Returns the pickled result of the function."""
    import peerlane

    if membership["rank"] == 0:
        hub = peerlane.Hub("127.0.0.1:0", membership["ranks"], membership["secret"])
        pipe.send(("hub", hub.address))
    elif pipe.poll(address_timeout):
        hub = pipe.recv()
    else:
        late = Timeout(f"rank 0 has opened no hub after {address_timeout} s")
        late.rank = 0
        raise late

    # The membership is an argument and no part of the environment, which processes inherit that the function starts.
    with peerlane.init(hub=hub, **membership, **options) as group:
        result = function(group, *args)
        return bytes(ForkingPickler.dumps(result))


def _end_with(parent: int) -> None:
    """Has this process killed when its parent ends, so that no rank is left alone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == parent:
        return

    # The parent has ended, or it has had the fork server start this process.
    def watch() -> None:
        multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="peerlane parent", daemon=True).start()

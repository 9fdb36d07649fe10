"""Runs a function as ranks on this machine, for tests and notebooks."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

from peerlane._arguments import whole
from peerlane._errors import Error


def spawn(function: Callable[..., Any], ranks: int, *args: Any, method: str | None = None, **options: Any) -> list[Any]:
    """Calls `function(group, *args)` in `ranks` processes of this machine, and returns the results in rank order.

    `options` are those of `peerlane.open`; the default backend is "host". `method` is that of `multiprocessing`: "spawn", or, if the function was defined in
    a notebook, "fork", which needs a parent that has not used Peerlane or a GPU.

    Raises `peerlane.Error` with the traceback of the first rank that has failed; the others are ended.
    """
    ranks = whole("ranks", ranks, 1)
    if method is None:
        is_interactive = getattr(function, "__module__", None) == "__main__" and not hasattr(sys.modules["__main__"], "__file__")
        method = "fork" if is_interactive else "spawn"
    context = multiprocessing.get_context(method)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options.setdefault("backend", "host")
    pipes, processes = [], []
    for rank in range(ranks):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(theirs, port, rank, ranks, function, args, options), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    results: list[Any] = [None] * ranks
    failures: dict[int, tuple[str, int | None]] = {}
    waiting = dict(enumerate(pipes))
    try:
        while waiting and _cause(failures) is None:
            # A rank that fails because of another one may be heard first.
            ready = multiprocessing.connection.wait(list(waiting.values()), 2 if failures else None)
            if not ready:
                break
            for pipe in ready:
                rank = next(number for number, known in waiting.items() if known is pipe)
                del waiting[rank]
                try:
                    is_done, value, blamed = pipe.recv()
                except EOFError:
                    processes[rank].join()
                    is_done, value, blamed = False, f"the process ended with status {processes[rank].exitcode}", None
                if is_done:
                    results[rank] = value
                else:
                    failures[rank] = value, blamed
    finally:
        for process in processes:
            if waiting:
                process.terminate()
            process.join(5)
            if process.is_alive():
                process.kill()
    if failures:
        rank = _cause(failures)
        rank = min(failures) if rank is None else rank
        failure = Error(f"rank {rank} failed: {failures[rank][0]}")
        failure.rank = rank
        raise failure
    return results


def _cause(failures: dict[int, tuple[str, int | None]]) -> int | None:
    """Returns a rank that failed for a reason of its own."""
    return next((rank for rank, (_, blamed) in failures.items() if blamed in (None, rank)), None)


def _run(pipe: Any, port: int, rank: int, ranks: int, function: Callable[..., Any], args: tuple, options: dict) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port)}  # fmt: skip
    import peerlane

    try:
        with peerlane.init(**options) as group:
            result = function(group, *args)
        pipe.send((True, result, None))
    except BaseException as error:
        blamed = error.rank if isinstance(error, Error) else None
        pipe.send((False, "".join(traceback.format_exception(error)).rstrip(), blamed))
    finally:
        pipe.close()

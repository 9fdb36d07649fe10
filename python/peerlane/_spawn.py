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

from peerlane._errors import Error


def spawn(function: Callable[..., Any], ranks: int, *args: Any, method: str | None = None, **options: Any) -> list[Any]:
    """Calls `function(group, *args)` in `ranks` processes of this machine, and returns the results in rank order.

    `options` are those of `peerlane.open`; the default backend is "host". `method` is that of `multiprocessing`: "spawn", or, if the function was defined in
    a notebook, "fork", which needs a parent that has not used Peerlane or a GPU.

    Raises `peerlane.Error` with the traceback of the first rank that has failed; the others are ended.
    """
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
    results, failure = [None] * ranks, None
    waiting = dict(enumerate(pipes))
    try:
        while waiting and failure is None:
            for pipe in multiprocessing.connection.wait(list(waiting.values())):
                rank = next(number for number, known in waiting.items() if known is pipe)
                del waiting[rank]
                try:
                    is_done, value = pipe.recv()
                except EOFError:
                    processes[rank].join()
                    is_done, value = False, f"the process ended with status {processes[rank].exitcode}"
                if is_done:
                    results[rank] = value
                elif failure is None:
                    failure = Error(f"rank {rank} failed: {value}")
                    failure.rank = rank
    finally:
        for process in processes:
            if waiting:
                process.terminate()
            process.join(5)
            if process.is_alive():
                process.kill()
    if failure is not None:
        raise failure
    return results


def _run(pipe: Any, port: int, rank: int, ranks: int, function: Callable[..., Any], args: tuple, options: dict) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port)}  # fmt: skip
    import peerlane

    try:
        with peerlane.init(**options) as group:
            result = function(group, *args)
        pipe.send((True, result))
    except BaseException as error:
        pipe.send((False, "".join(traceback.format_exception(error)).rstrip()))
    finally:
        pipe.close()

"""Groups of ranks, prepared operations, and the futures of starts."""

from __future__ import annotations

import json
import math
import operator
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from peerlane import _native
from peerlane._arguments import DESCRIPTOR_MAX, WHOLE_MAX, file_number, shown, whole, wholes
from peerlane._arrays import NUMPY_NAMES, dtype_name
from peerlane._errors import Error, InvalidArgument, names_call

_OPEN: weakref.WeakSet[Group] = weakref.WeakSet()
_STARTS: weakref.WeakSet[Future] = weakref.WeakSet()


class HasFileno(Protocol):
    """An open file, such as that of `open`."""

    def fileno(self) -> int: ...


class Future:
    """Waits for one started collective and returns its output."""

    def __init__(self, operation: _native.Operation, output: Callable[[], Any], finish: Callable[[], None] | None = None):
        self._operation, self._output, self._finish, self._is_done = operation, output, finish, False
        self._value: Any = None
        _STARTS.add(self)

    def wait(self, timeout: float | None = None) -> Any:
        """Waits until the output is complete, and returns the output.

        `timeout` is in seconds; if it passes, `TimeoutError` is raised and the start goes on. Zero or a negative number, such as the time left until a deadline
        that has passed, looks once. Ctrl-C ends the wait in the same way.
        Raises `PeerLost` or `Timeout` with the rank if the start fails; the group has ended then.
        """
        if not self._is_done:
            self._operation.wait(timeout)
            self._complete()
        return self._value

    def wait_block(self, block: int, chunk: int | None = None, timeout: float | None = None) -> Any:
        """Waits until a block of the output has arrived, or one chunk of it, and returns the memory of the block.

        The operation was prepared with `arrivals`. `timeout` is as for `wait`.
        """
        self._operation.wait_block(block, chunk, timeout)
        return self._operation.block(block)

    def depart(self, block: int, chunk: int | None = None) -> None:
        """Lets the start read a block of the input, which must not change any more. The operation was prepared with `departures`."""
        self._operation.depart(block, chunk)

    def done(self) -> bool:
        """Returns whether the output is complete, without waiting."""
        if not self._is_done and self._operation.is_done():
            self._complete()
        return self._is_done

    def _complete(self) -> None:
        self._is_done = True
        if self._finish is not None:
            self._finish()
        self._value = self._output()


class Operation:
    """A prepared collective operation, which can start any number of times.

    `input` and `output` are `Memory`: `numpy.asarray(operation.input)` and `torch.from_dlpack(operation.input)` are views of it.
    """

    def __init__(self, native: _native.Operation):
        self._native = native

    @property
    def input(self) -> _native.Memory:
        """The input of this rank: elements of the type of the operation. Fill it before a start."""
        return self._native.input

    @property
    def output(self) -> _native.Memory:
        """The output of the last start. With two outputs in turn, ask again after each start."""
        return self._native.output

    def run(self, timeout: float | None = None) -> None:
        """Starts the operation and waits until the output is complete. Collective.

        Raises `PeerLost` or `Timeout` with the rank, which ends the group; `TimeoutError` after `timeout` seconds, which does not.
        """
        self._native.run(timeout)

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the output of the start in progress is complete, such as after `run` has raised `TimeoutError`."""
        self._native.wait(timeout)

    def start(self) -> Future:
        """Starts the operation and returns a future. Collective."""
        self._native.start()
        return Future(self._native, lambda: self._native.output)

    @names_call
    def start_on(self, stream: Any) -> _native.Memory:
        """Enqueues a start on a stream of the GPU and returns the output of this start. Collective.

        `stream` is a `torch.cuda.Stream`, an object with `__cuda_stream__`, or the handle as a number; no default stream. It must live until the
        operation has started on another one. Enqueue what reads the output before the next start. On a stream that is captured, the start is
        recorded; that needs `capturable=True`.
        """
        return self._native.start_on(stream_handle(stream))

    @property
    def arrivals(self) -> list[tuple[int, int]]:
        """The blocks of the output in the order in which they arrive, each as a pair: the rank that it comes from, and the number of its chunk."""
        return self._native.arrivals

    @property
    def departures(self) -> list[tuple[int, int]]:
        """The blocks of the input in the order in which starts read them, each as a pair: the rank that it is for, and the number of its chunk."""
        return self._native.departures

    @names_call
    def start_beside(self, stream: Any) -> BesideStart:
        """Starts the operation behind the work that a stream holds now, and beside what is enqueued later. Collective.

        The operation has `arrivals` or `departures`. Streams are those of `start_on`, and live until the operation has started on others.
        """
        return BesideStart(self._native, self._native.start_beside(stream_handle(stream)))

    @names_call
    def resize(self, count: int | Sequence[int] | tuple[list[int], list[int]], *, input: int | None = None,
               output: int | None = None) -> None:  # fmt: skip
        """Sets the number of elements of a block of the next starts, and where input and output begin in their windows, in elements.

        In an all-reduce, a reduce and scans it is the number of elements of the whole array.
        It needs `resizable=True`. All ranks set the same. `count` can be a list with one number for each rank, or, for an all-to-all, a pair of lists:
        what this rank sends to and receives from each rank.
        """
        self._native.resize(_counts(count), input, output)

    def check(self) -> None:
        """Raises the error of a start on a stream or of a replayed graph, if there was one. It does not wait."""
        self._native.check()

    def report(self) -> dict:
        """Returns how the operation runs: algorithm, engines, bytes by tier, fallbacks and what was proven."""
        return json.loads(self._native.report())

    def drop(self) -> None:
        """Frees the operation now.

        Its memory is used again after all ranks have done so; views of it are undefined from now on.
        """
        self._native.drop()


class BesideStart:
    """A start beside streams, whose blocks arrive and depart one after the other.

    As a context manager it is finished at the end of the block. The next start of the operation needs that.
    """

    def __init__(self, native: _native.Operation, output: _native.Memory):
        self._native, self._output = native, output

    @property
    def output(self) -> _native.Memory:
        """The output of this start."""
        return self._output

    def block(self, rank: int) -> _native.Memory:
        """Returns the block of a rank in the output."""
        return self._native.block(rank)

    @names_call
    def wait_on(self, stream: Any, block: int, chunk: int | None = None) -> None:
        """Has later work on a stream follow the arrival of a block, or of one chunk of it. Several streams can wait for one block."""
        self._native.wait_block_on(stream_handle(stream), block, chunk)

    @names_call
    def depart_on(self, stream: Any, block: int, chunk: int | None = None) -> None:
        """Lets the start read a block of the input, or one chunk of it, behind the work that a stream holds now."""
        self._native.depart(block, chunk, stream_handle(stream))

    def wait_block(self, block: int, chunk: int | None = None, timeout: float | None = None) -> None:
        """Waits on the host until a block has arrived. Raises `TimeoutError` after `timeout` seconds."""
        self._native.wait_block(block, chunk, timeout)

    def finish(self) -> None:
        """Has the later work of the stream of the start follow the whole start, and what the streams that waited for blocks hold now."""
        self._native.finish()

    def __enter__(self) -> BesideStart:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.finish()
            return
        with suppress(Error):  # the exception of the block tells more
            self.finish()


@names_call
class Window:
    """Memory of the same size on every rank, which operations use by place."""

    def __init__(self, native: _native.Window, keep: Any = None):
        self._native, self._keep = native, keep

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self._native.nbytes

    @property
    def address(self) -> int:
        """The address on this rank: of the host, or of the device."""
        return self._native.address

    def memory(self, begin: int = 0, nbytes: int | None = None, dtype: Any = "u8") -> _native.Memory:
        """Returns `nbytes` bytes from byte `begin` on, as elements of a type."""
        return self._native.memory(begin, nbytes, dtype_name(dtype))


@names_call
class Group:
    """A group of ranks. `peerlane.init` and `peerlane.open` make one.

    As a context manager it is closed at the end of the block, or abandoned if an exception leaves the block.
    """

    def __init__(self, native: _native.Group):
        from peerlane._collectives import Collectives

        self._native = native
        self._calls = Collectives(native)
        self.is_closed = False
        _OPEN.add(self)

    rank: int = property(lambda self: self._native.rank, doc="The rank of this process, from 0.")
    size: int = property(lambda self: self._native.ranks, doc="The number of ranks.")
    backend: str = property(lambda self: self._native.backend, doc='The backend inside a node, such as "host" or "cuda".')
    device: int | None = property(lambda self: self._native.device, doc="The number of this rank's GPU, or None.")
    selection: str = property(lambda self: self._native.selection, doc="Which backends and which GPU are used, and why.")
    engines: list[str] = property(lambda self: self._native.engines, doc="The kinds of engines that all ranks offer.")

    def __repr__(self) -> str:
        return f"<peerlane.Group: rank {self.rank} of {self.size}, {self.selection}>"

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    # Control

    def barrier(self) -> None:
        """Waits until all ranks have called it. Collective."""
        self._calls.finish()
        self._calls.arena.settled().barrier()

    def stats(self) -> dict[str, Any]:
        """Returns what the group holds on this rank: `memory` is a list with `kind`, `bytes`, `space` and `device`.

        Kinds are `heap`, `inboxes`, `flags`, `windows` and `buffers`.
        """
        return json.loads(self._native.stats())

    def trim(self) -> int:
        """Releases the memory of the heap that no operation uses any more, and returns its bytes on this rank. Collective."""
        self._calls.finish()
        return self._calls.arena.settled().trim()

    def check(self) -> None:
        """Raises the error with which the group has ended, if it has. It does not wait."""
        self._native.check()

    def exchange(self, data: bytes) -> list[bytes]:
        """Sends `data` to every rank and returns what each rank sent, in rank order. Collective, for small control messages."""
        return self._calls.arena.settled().exchange(data)

    def split(self, color: int | None, key: int = 0, *, label: str | None = None) -> Group | None:
        """Forms groups of the ranks with the same color, ordered by key and then by rank. Collective. None gets no group.

        `label` names the new group in the errors of this rank; by default it is the call, such as "split 1, color 0".
        """
        part = self._calls.arena.settled().split(color, key, label)
        return None if part is None else Group(part)

    def subgroup(self, ranks: Sequence[int]) -> Group:
        """Forms a group of a list of ranks, in its order. Collective: every rank gives the list of its own group."""
        with self._calls.checks():
            ranks = wholes("ranks", ranks)
        return Group(self._calls.arena.settled().subgroup(ranks))

    def shrink(self) -> Group:
        """Opens a group of the remaining ranks after a rank was lost. Every remaining rank calls it."""
        return Group(self._native.shrink())

    def close(self) -> None:
        """Closes the group, after the work of all ranks. Collective. A second call does nothing.

        If the variable PEERLANE_REPORT is set, rank 0 prints how the calls on arrays ran: their collectives, algorithms, engines and numbers.
        """
        if not self.is_closed:
            self._calls.finish()
            if os.environ.get("PEERLANE_REPORT"):
                self._print_paths()
            self.is_closed = True
            self._calls.clear()
            try:
                self._calls.arena.settled().close()
            except BaseException:
                self.abandon()
                raise

    def _print_paths(self) -> None:
        if self.rank != 0:
            return
        report = self.report()
        lines = [
            f"peerlane: {report['calls']} calls of rank 0 in a group of {self.size}, {report['calls_with_copies']} with copies ({self.selection})"
        ]
        for path in report["paths"]:
            form = f" ({path['form']})" if path["form"] else ""
            lines.append(f"  {path['calls']:>8}  {path['collective']}{form}: {path['algorithm']} on {path['engine']}")
        print("\n".join(lines), file=sys.stderr)

    def abandon(self) -> None:
        """Leaves the group without the other ranks, which lose this rank."""
        self.is_closed = True
        self._native.abandon()

    # Operations and memory

    def prepare(self, collective: str, dtype: Any, count: int | Sequence[int] | tuple[list[int], list[int]], *, root: int = 0,
                reduction: str = "sum", algorithm: str | None = None, chunks: int | None = None, in_place: bool = False,
                capturable: bool = False, resizable: bool = False, check_starts: bool = False, arrivals: bool = False,
                departures: bool = False, strict: bool = False,
                beside_compute: bool | None = None, engine: str | None = None, timeout: float | None = None, input: tuple[Window, int] | None = None,
                output: tuple[Window, int] | None = None, matrix: tuple[int, str] | None = None, label: str | None = None) -> Operation:  # fmt: skip
        """Prepares an operation: plans and verifies it, and takes memory. Collective.

        `collective` is "all-gather", "broadcast", "all-to-all", "gather", "scatter", "reduce-scatter", "all-reduce", "reduce", "scan" or "exscan".
        `count` is the number of elements of a block: what a rank gives to an output, and of the whole array in an all-reduce, a reduce and scans; or one
        number for each rank; or, for an all-to-all, a pair of lists. `reduction` is as for `reduce_scatter`, also for a NaN. `input` and `output` are a window and the element at which they begin; without them the
        operation has memory of its own. `timeout` is in seconds. With `matrix`, a number of rows and "input", "output" or "both", the input, the output or both
        are matrices of that many rows, of which each block is a range of columns. `label`, equal on all ranks, names the operation in errors.

        With `beside_compute`, the operation runs beside kernels of the program and takes few compute units, even if it is slower on an idle GPU; None is the
        setting of the group. `engine` is the kind of engines, one of `engines`, instead of that of the group or the fastest one; `report` names the kind that runs.

        With `arrivals`, a start tells when each block of its output has arrived, and with `departures` it reads each block of its input when the program says that
        it is written: see `Operation.start_beside` and `Future.wait_block`.

        With `capturable`, starts can be recorded into graphs. All replays of such graphs must be complete before the operation is dropped or the group is
        closed. During a replay, the host must not access the memory of the operation. Nothing checks this, and memory that is used elsewhere is overwritten
        if it does not hold.

        Raises `Mismatch` with the rank and the option that differs between ranks, and `InvalidArgument`.
        """
        with self._calls.checks():
            for name, place in (("input", input), ("output", output)):
                if place is not None and not (isinstance(place, tuple) and len(place) == 2 and isinstance(place[0], Window)):
                    raise InvalidArgument(f"{name} is {shown(place)}, expected a pair: a window and the element at which it begins")
            dtype, counts = dtype_name(dtype), _counts(count)
        native = self._calls.arena.settled().prepare(
            collective, dtype, counts, root=root, reduction=reduction, algorithm=algorithm, chunks=chunks,
            in_place=in_place, capturable=capturable, resizable=resizable, check_starts=check_starts,
            arrivals=arrivals, departures=departures, strict=strict, beside_compute=beside_compute, engine=engine, timeout=timeout, input=input and (input[0]._native, input[1]),
            output=output and (output[0]._native, output[1]), matrix=matrix, label=label,
        )  # fmt: skip
        return Operation(native)

    def window(self, nbytes: int) -> Window:
        """Allocates a window of zeroed memory of `nbytes` bytes on every rank: device memory if the group uses GPUs. Collective."""
        with self._calls.checks():
            nbytes = whole("nbytes", nbytes)
        return Window(self._calls.arena.settled().allocate_window(nbytes))

    def window_over(self, array: Any) -> Window:
        """Opens a window over memory of the caller, such as a tensor that `cudaMalloc` has allocated, of equal size on every rank. Collective.

        The window keeps the array. On the host backend, the memory must be one that other processes can map, unless the ranks are threads: see
        `window_over_descriptor`. Memory of PyTorch's caching allocator works if it is not `expandable_segments`.
        """
        from peerlane._arrays import view

        with self._calls.checks():
            seen = view("array", array)
            if seen.unwritable is not None:
                raise InvalidArgument(f"array {seen.unwritable}, expected one that can be written: other ranks write to a window")
        return Window(self._calls.arena.settled().window_over(seen.address, seen.nbytes), array)

    def window_over_descriptor(self, descriptor: int | HasFileno, nbytes: int, offset: int = 0) -> Window:
        """Opens a window over `nbytes` bytes of a file of the caller, of equal size on every rank, so that ranks in other processes can use them. Collective.

        The file is a memfd, or a file of `/dev/shm` or of a hugetlbfs, opened for reading and writing; `descriptor` is its number, or an object with
        `fileno()`. The part begins at `offset`, a multiple of the file's page size. An `mmap` of the program shows the same bytes. The file may be closed
        after the call. A memfd that can be sealed gets the seal `F_SEAL_SHRINK`, which lasts as long as the file.

        Until `release`, do not shorten the file and punch no holes into it: a process that accesses a page behind the end of the file is killed by `SIGBUS`.
        """
        with self._calls.checks():
            number = whole("descriptor", file_number("descriptor", descriptor), most=DESCRIPTOR_MAX)
            nbytes, offset = whole("nbytes", nbytes), whole("offset", offset)
        return Window(self._calls.arena.settled().window_over_descriptor(number, nbytes, offset))

    def release(self, window: Window) -> None:
        """Gives the memory of a window back on every rank. Collective.

        Before, drop its operations on all ranks, and delete the arrays and tensors over it. If it fails, the window and its memory stay in use on all
        ranks, and the call can be repeated.
        """
        with self._calls.checks():
            if not isinstance(window, Window):
                raise InvalidArgument(f"window is {shown(window)}, expected a peerlane.Window")
        self._calls.arena.settled().release(window._native)

    def empty(self, shape: int | Sequence[int], dtype: Any = "f32") -> Any:
        """Allocates an array at equal places on all ranks, so that collectives need no copy. Collective: every rank allocates alike.

        Memory is taken in steps of 2 MiB, which small arrays share, and arrays that are freed on all ranks give theirs to the next ones. On the host, a page
        is taken from the system when it is first used. `OutOfMemory` says how much each rank holds.

        Returns an array of NumPy, or on GPUs a tensor of PyTorch (`peerlane.torch.empty` returns a tensor on both). The values are undefined. NumPy has no
        "bf16" and no floats of 8 bits, so on the host an array of these has unsigned integers, which cannot stand for them in reductions.
        """
        if self._native.memory_device != (1, 0):
            from peerlane.torch import empty

            return empty(shape, dtype=dtype, group=self)
        import numpy

        shape, name = shape_of(shape), dtype_name(dtype)
        dtype = numpy.dtype(NUMPY_NAMES[name])
        block = self._calls.arena.allocate(nbytes_of(shape, dtype.itemsize))
        return numpy.frombuffer(block.memory("u8"), dtype, math.prod(shape)).reshape(shape)

    def reserve(self, nbytes: int) -> None:
        """Takes memory for `empty` in advance, with all its pages. Collective."""
        with self._calls.checks():
            nbytes = whole("nbytes", nbytes)
        self._calls.arena.reserve(nbytes)

    # Collectives on arrays

    def all_gather(self, input: Any, output: Any, **options: Any) -> Any:
        """Gathers the input of every rank to the output of every rank, in rank order. Collective.

        `input` has n elements and `output` n times the number of ranks. With `counts`, a list, rank r gives `counts[r]` elements. Both are contiguous
        arrays on the memory of the group: anything with DLPack or the buffer protocol. Arrays of `empty` are not copied, but parts of them are.

        All collectives here take: `stream` (GPUs: the stream on which to enqueue; default is PyTorch's current one), `wait` (False returns a future with `wait`
        and `done`), `beside_compute` as for `prepare` and, on the host, `timeout` in seconds. They return the output. Raise `InvalidArgument` for an array that does not fit, `Mismatch`, `PeerLost` or `Timeout`
        with the rank.
        """
        return self._calls.call("all-gather", input, output, **options)

    def broadcast(self, array: Any, root: int = 0, **options: Any) -> Any:
        """Copies the array of rank `root` to that of every rank. Collective. Options as for `all_gather`."""
        return self._calls.call("broadcast", array, array, root=root, **options)

    def all_to_all(self, input: Any, output: Any, **options: Any) -> Any:
        """Sends block r of the input to rank r, as block number of this rank in its output. Collective.

        With `splits=(send, receive)`, two lists, the blocks have sizes of their own, in elements; this costs an exchange for each call. Options as
        for `all_gather`.
        """
        return self._calls.call("all-to-all", input, output, **options)

    def gather(self, input: Any, output: Any = None, root: int = 0, **options: Any) -> Any:
        """Gathers the input of every rank to the output of rank `root`; other ranks need none. Collective. Options as for `all_gather`."""
        return self._calls.call("gather", input, output, root=root, **options)

    def scatter(self, input: Any, output: Any, root: int = 0, **options: Any) -> Any:
        """Sends block r of the input of rank `root` to the output of rank r. Collective. Options as for `all_gather`."""
        return self._calls.call("scatter", input, output, root=root, **options)

    def reduce_scatter(self, input: Any, output: Any, reduction: str = "sum", **options: Any) -> Any:
        """Reduces the inputs of all ranks, and gives block r of the result to rank r. Collective. Options as for `all_gather`.

        With `counts`, one number for each rank, blocks have sizes of their own.

        `reduction` is "sum", "max", "min", "maximum", "minimum", or, for floating point, "average". Every rank adds in rank order, so results are equal in
        every run. "max" and "min" prefer a number to a NaN, as `numpy.fmax` and NCCL's kernels. "maximum" and "minimum", as those of `numpy` and `torch`,
        sums and averages are NaN if any element is.
        """
        return self._calls.call("reduce-scatter", input, output, reduction=reduction, **options)

    def all_reduce(self, input: Any, output: Any = None, reduction: str = "sum", **options: Any) -> Any:
        """Reduces the inputs of all ranks to every rank; in place without `output`. Collective. Options as for `reduce_scatter`, without `counts`.

        A `reduction` of "max" or "min" prefers a number to a NaN.
        """
        return self._calls.call("all-reduce", input, input if output is None else output, reduction=reduction, **options)

    def reduce(self, input: Any, output: Any = None, root: int = 0, reduction: str = "sum", **options: Any) -> Any:
        """Reduces the inputs of all ranks to rank `root`; other ranks need no output. Collective. Options as for `reduce_scatter`.

        A `reduction` of "max" or "min" prefers a number to a NaN.
        """
        return self._calls.call("reduce", input, output, root=root, reduction=reduction, **options)

    def scan(self, input: Any, output: Any = None, reduction: str = "sum", **options: Any) -> Any:
        """Reduces the inputs of the ranks up to its own to every rank; in place without `output`. Collective. Options as for `all_reduce`.

        Rank 0 gets its own input, and the last rank what an all-reduce gives.
        """
        return self._calls.call("scan", input, input if output is None else output, reduction=reduction, **options)

    def exscan(self, input: Any, output: Any = None, reduction: str = "sum", **options: Any) -> Any:
        """Reduces the inputs of the ranks below its own to every rank except rank 0. Collective. Options as for `all_reduce`.

        Rank 0 needs no output; one that it gives stays as it is. On the other ranks, an input that is given as the output is overwritten.
        """
        return self._calls.call("exscan", input, output, reduction=reduction, **options)

    def report(self) -> dict:
        """Returns what the calls on arrays did: calls with copies, the paths by which they ran, prepared operations, hits of the cache, and memory."""
        return {"rank": self.rank, "size": self.size, "selection": self.selection, **self._calls.report()}


def _counts(count: Any) -> int | list[int] | tuple[list[int], list[int]]:
    if isinstance(count, tuple) and len(count) == 2 and not any(_is_whole(lens) for lens in count):
        return wholes("count", count[0]), wholes("count", count[1])
    if _is_whole(count):
        return whole("count", count)
    if not hasattr(count, "__iter__"):
        raise InvalidArgument(f"count is {shown(count)}, expected a whole number, a number for each rank, or two lists")
    return wholes("count", count)


def _is_whole(value: Any) -> bool:
    # Arrays have `__index__` too, which raises unless they have one element.
    try:
        operator.index(value)
    except Exception:
        return False
    return True


def shape_of(shape: Any) -> tuple[int, ...]:
    """Returns a shape as a tuple."""
    if not _is_whole(shape) and hasattr(shape, "__iter__"):
        return tuple(wholes("shape", shape))
    return (whole("shape", shape),)


def nbytes_of(shape: tuple[int, ...], itemsize: int) -> int:
    """Returns the bytes of an array."""
    nbytes = math.prod(shape) * itemsize
    if nbytes > WHOLE_MAX:
        raise InvalidArgument(f"shape is {shown(shape)}, which are {shown(nbytes)} bytes, expected at most {WHOLE_MAX}")
    return nbytes


def stream_handle(stream: Any) -> int:
    """Returns the handle of a stream."""
    if isinstance(stream, int):
        return whole("stream", stream)
    if hasattr(stream, "__cuda_stream__"):
        return whole("stream", stream.__cuda_stream__()[1])
    for name in ("cuda_stream", "ptr", "handle"):
        if hasattr(stream, name):
            return whole("stream", getattr(stream, name))
    text = f"stream is a {type(stream).__name__}, expected a torch.cuda.Stream, an object with `__cuda_stream__` or a number"
    raise InvalidArgument(text)


def _forget_objects() -> None:
    """Forgets the groups and the starts of the process from which this one was forked."""
    _OPEN.clear()
    _STARTS.clear()


os.register_at_fork(after_in_child=_forget_objects)


def end_process() -> None:
    """Leaves the open groups when the interpreter ends. The other ranks lose this rank."""
    groups = [group for group in _OPEN if not group.is_closed]
    if groups and any(not start._is_done for start in _STARTS):
        print(f"peerlane: rank {groups[0].rank} ends with a start in progress; wait for it, then close the group", file=sys.stderr)
    for group in groups:
        group.abandon()

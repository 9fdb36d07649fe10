"""Multiplies matrices while their rows are gathered, and while the rows of their product are reduced."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from peerlane._arguments import shown, whole
from peerlane._arrays import CPU, dtype_name
from peerlane._errors import InvalidArgument
from peerlane._group import Group, Operation, Window
from peerlane._pool import Pool, default_limit
from peerlane._torch import operator_name, torch

# Operations that are kept, of which the ones that were not used for longest are dropped.
_OPERATIONS_MAX = 64
_STREAMS_MAX = 8
# Shapes whose scratch memory is kept.
_SCRATCH_MAX = 8
# Chunks of a block begin at multiples of so many bytes.
_CHUNK_ALIGNMENT = 64


class _Place(NamedTuple):
    """A range of a window."""

    window: Any
    begin: int
    nbytes: int


class Matmuls:
    """Makes the calls of one group, and keeps its operations, scratch memory and streams."""

    def __init__(self, group: Group):
        self.group = group
        self.is_cpu = group._native.memory_device == CPU
        # By the places of input and output, which are equal on all ranks.
        self.operations: dict[tuple, Operation] = {}
        # The memory of results, which is used again when callers have dropped them.
        self.pool = Pool(group, default_limit(group))
        # Memory that no caller gets, by its use.
        self.scratch: dict[tuple, tuple[Any, Any]] = {}
        # The stream of starts, and the streams of products.
        self.streams: list[Any] = []

    def all_gather_matmul(
        self, shard: Any, others: Any, dim: int, return_gathered: bool, streams: int, chunks: int
    ) -> tuple[Any, list[Any]]:
        """Gathers the rows of all ranks, and multiplies each block of them when it has arrived."""
        group, me = self.group, self.group.rank
        with group._calls.checks("all-gather"):
            others, dim = _check_factors(shard, others, dim), _check_dim("gather_dim", shard, dim)
            streams, chunks = whole("streams", streams, least=1, most=_STREAMS_MAX), whole("chunks", chunks, least=1)
        moved = shard.movedim(dim, 0)
        rows = moved.flatten(0, -2).contiguous()
        count, width = rows.shape
        chunks = _chunks(chunks, count, width * shard.dtype.itemsize)

        shape = (group.size * count, width)
        gathered, block = self._around(rows) or self._memory(("gathered",), shape, shard.dtype, return_gathered)
        operation = self._operation("all-gather", shard.dtype, rows.numel(), chunks, output=block, in_place=True, arrivals=True)
        products = [rows.new_empty((group.size * count, other.shape[1])) for other in others]
        part = count // chunks

        def multiply(factor: Any, begin: int) -> None:
            for product, other in zip(products, others):
                torch.mm(factor, other, out=product[begin : begin + len(factor)])

        own = gathered[me * count : (me + 1) * count]
        arrivals = [(rank, chunk) for rank, chunk in operation.arrivals if rank != me]
        is_there = own.data_ptr() == rows.data_ptr()
        if self.is_cpu:
            if not is_there:
                own.copy_(rows)
            future = operation.start()
            multiply(rows, me * count)
            for rank, chunk in arrivals:
                future.wait_block(rank, chunk)
                begin = rank * count + chunk * part
                multiply(gathered[begin : begin + part], begin)
            future.wait()
        else:
            with self._beside(streams) as (first, readers):
                if not is_there:
                    # The first product would hold up the copy, for which the other ranks wait.
                    with torch.cuda.stream(first):
                        own.copy_(rows)
                    readers[0].wait_stream(first)
                with operation.start_beside(first) as start:
                    with torch.cuda.stream(readers[0]):
                        multiply(rows, me * count)
                    for number, (rank, chunk) in enumerate(arrivals, 1):
                        reader, begin = readers[number % streams], rank * count + chunk * part
                        start.wait_on(reader, rank, chunk)
                        with torch.cuda.stream(reader):
                            multiply(gathered[begin : begin + part], begin)

        leading = (group.size * moved.shape[0], *moved.shape[1:-1])
        outputs = [product.view(*leading, -1).movedim(0, dim) for product in products]
        return (gathered.view(*leading, width).movedim(0, dim) if return_gathered else None), outputs

    def matmul_reduce_scatter(self, factor: Any, other: Any, op: Any, dim: int, streams: int, chunks: int) -> Any:
        """Multiplies the rows for each rank, and sends them when they are written, to be reduced there."""
        group, size = self.group, self.group.size
        with group._calls.checks("reduce-scatter"):
            (other,), dim = _check_factors(factor, [other], dim), _check_dim("scatter_dim", factor, dim)
            if factor.shape[dim] % size:
                raise InvalidArgument(
                    f"A has {factor.shape[dim]} rows in dimension {dim}, expected a multiple of {size}, one part for each rank"
                )
            reduction, streams = operator_name(op), whole("streams", streams, least=1, most=_STREAMS_MAX)
            chunks = whole("chunks", chunks, least=1)
        moved = factor.movedim(dim, 0)
        rows = moved.flatten(0, -2).contiguous()
        count, width = rows.shape[0] // size, other.shape[1]
        chunks = _chunks(chunks, count, width * factor.dtype.itemsize)

        products, input = self._memory(("products",), (rows.shape[0], width), factor.dtype, False)
        result, output = self._memory(("result",), (count, width), factor.dtype, True)
        options = {"reduction": reduction, "departures": True}
        operation = self._operation("reduce-scatter", factor.dtype, count * width, chunks, input=input, output=output, **options)
        part = count // chunks

        def multiply(rank: int, chunk: int) -> None:
            begin = rank * count + chunk * part
            torch.mm(rows[begin : begin + part], other, out=products[begin : begin + part])

        departures = operation.departures
        if self.is_cpu:
            future = operation.start()
            for rank, chunk in departures:
                multiply(rank, chunk)
                future.depart(rank, chunk)
            future.wait()
        else:
            with self._beside(streams) as (first, writers), operation.start_beside(first) as start:
                for number, (rank, chunk) in enumerate(departures):
                    writer = writers[number % streams]
                    with torch.cuda.stream(writer):
                        multiply(rank, chunk)
                    start.depart_on(writer, rank, chunk)
        return result.view(moved.shape[0] // size, *moved.shape[1:-1], width).movedim(0, dim)

    @contextmanager
    def _beside(self, count: int) -> Iterator[tuple[Any, list[Any]]]:
        """Gives the stream of a start and streams for products, between the work of the current stream.

        All of them are streams of this object, because the library takes no default stream, which synchronises with all others.
        """
        device = self.group._native.memory_device[1]
        while len(self.streams) <= count:
            self.streams.append(torch.cuda.Stream(device))
        first, *others = self.streams[: count + 1]

        caller = torch.cuda.current_stream(device)
        begun = caller.record_event()
        for stream in (first, *others):
            stream.wait_event(begun)
        try:
            yield first, others
        finally:
            # The start follows the streams that have read its blocks, or written them.
            for stream in (first, *others):
                caller.wait_stream(stream)

    def _around(self, rows: Any) -> tuple[Any, Any] | None:
        """Returns the tensor of all ranks of which the rows are this rank's part, with its place, if they are in one of `empty`."""
        nbytes = rows.numel() * rows.element_size()
        address = rows.data_ptr() - self.group.rank * nbytes
        if not self.group._native.has_place(address, self.group.size * nbytes):
            return None

        windows = self.group._calls.arena.windows
        window = next(one for one in windows if one.address <= address < one.address + one.nbytes)
        shape = (self.group.size * len(rows), rows.shape[1])
        # The storage of the rows is that of the whole tensor.
        whole_tensor = rows.new_empty(0).set_(rows.untyped_storage(), rows.storage_offset() - self.group.rank * rows.numel(), shape)
        return whole_tensor, _Place(window, address - window.address, self.group.size * nbytes)

    def _memory(self, use: tuple, shape: tuple, dtype: Any, is_new: bool) -> tuple[Any, Any]:
        """Returns a tensor with its block of the arena: a new one, or the one for this use, which is kept."""
        key = (*use, shape, dtype)
        if not is_new and (kept := self.scratch.pop(key, None)) is not None:
            # The newest one is the last one.
            self.scratch[key] = kept
            return kept

        tensor = self.pool.allocate(shape, dtype) if is_new else None
        if tensor is not None:
            address = tensor.data_ptr()
            return tensor, next(block for block in self.pool.blocks if block.window.address + block.begin == address)

        block = self.group._calls.arena.allocate(math.prod(shape) * dtype.itemsize)
        tensor = torch.from_dlpack(block.memory(dtype_name(dtype)).__dlpack__()).view(shape)
        if not is_new:
            if len(self.scratch) >= _SCRATCH_MAX:
                del self.scratch[next(iter(self.scratch))]
            self.scratch[key] = tensor, block
        return tensor, block

    def _operation(
        self, collective: str, dtype: Any, count: int, chunks: int, *, output: Any, input: Any = None, **options: Any
    ) -> Operation:
        """Returns the operation over these places, which the first call with them prepares."""
        places = [block and (block.window.address + block.begin, block.nbytes) for block in (input, output)]
        key = (collective, dtype, count, chunks, *places, *options.items())
        operation = self.operations.pop(key, None)
        if operation is None:
            if len(self.operations) >= _OPERATIONS_MAX:
                self.operations.pop(next(iter(self.operations))).drop()
            of_window = [block and (Window(block.window), block.begin // dtype.itemsize) for block in (input, output)]
            placed = {"input": of_window[0], "output": of_window[1], "chunks": chunks, "beside_compute": False}
            operation = self.group.prepare(collective, dtype_name(dtype), count, **placed, **options)
        # The newest one is the last one.
        self.operations[key] = operation
        return operation


def _chunks(chunks: int, count: int, row_bytes: int) -> int:
    """Returns the number of chunks of a block of rows if each of them has whole rows, and otherwise 1."""
    if count % chunks or count // chunks * row_bytes % _CHUNK_ALIGNMENT:
        return 1
    return chunks


def of(group: Group) -> Matmuls:
    """Returns the object of a group, which the first call makes."""
    if group._calls.matmuls is None:
        group._calls.matmuls = Matmuls(group)
    return group._calls.matmuls


def _check_factors(first: Any, others: Any, dim: Any) -> list[Any]:
    """Returns the second factors of products, after a look at all factors."""
    if not isinstance(first, torch.Tensor) or first.dim() < 2:
        raise InvalidArgument(f"the first factor is {shown(first)}, expected a tensor of at least two dimensions")
    if not isinstance(others, (list, tuple)) or not others:
        raise InvalidArgument(f"Bs is {shown(others)}, expected a list of matrices")
    for place, other in enumerate(others):
        if not isinstance(other, torch.Tensor) or other.dim() != 2 or other.shape[0] != first.shape[-1]:
            found = tuple(other.shape) if isinstance(other, torch.Tensor) else shown(other)
            raise InvalidArgument(f"matrix {place} is {found}, expected {first.shape[-1]} rows and any number of columns")
        if other.dtype != first.dtype or other.device != first.device:
            text = f"matrix {place} has elements of {other.dtype} on {other.device}, expected {first.dtype} on {first.device} as in the first factor"
            raise InvalidArgument(text)
    return list(others)


def _check_dim(name: str, tensor: Any, dim: Any) -> int:
    """Returns a dimension of rows, counted from the first one."""
    last = tensor.dim() - 1
    if isinstance(dim, int) and -last - 1 <= dim <= last and dim % (last + 1) != last:
        return dim % (last + 1)
    raise InvalidArgument(f"{name} is {shown(dim)}, expected a dimension below {last}, the one that is multiplied")

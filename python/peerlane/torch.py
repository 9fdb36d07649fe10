"""Collectives on tensors, with the signatures of `torch.distributed`.

`group` is a `peerlane.Group`, or a `ProcessGroup` of PyTorch for which a group is opened at first use, or None for the default one. On a GPU, calls are
enqueued on the current stream, and with `async_op=True` on a stream of their own. Tensors must be contiguous. A tensor of `empty` is gathered without a
copy; parts of it and others are copied to memory of the library. These functions are not differentiable; the ops of `torch.ops.peerlane` are.
Collectives also take `beside_compute`, as `peerlane.Group.prepare`.
"""

from __future__ import annotations

from typing import Any

from peerlane import _torch as calls
from peerlane import _torch_group, _torch_matmul, _torch_ops
from peerlane._arguments import shown
from peerlane._arrays import TORCH_NAMES, dtype_name
from peerlane._errors import InvalidArgument, names_call
from peerlane._group import Group, nbytes_of, shape_of
from peerlane._torch import Work, call, dist, torch
from peerlane._torch_group import ProcessGroup, close, group_of, resolved
from peerlane._torch_ops import name_of

__all__ = [
    "ProcessGroup", "Work", "all_gather", "all_gather_into_tensor", "all_gather_matmul", "all_reduce", "all_to_all_single", "barrier", "broadcast", "close",
    "empty", "gather", "group_of", "matmul_reduce_scatter", "name_of", "reduce", "reduce_scatter", "reduce_scatter_tensor", "report", "scatter",
]  # fmt: skip

_DLPACK = {torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.uint8, torch.int8}

_torch_group.register()


@names_call
def empty(*size: Any, dtype: Any = None, group: Any = None) -> torch.Tensor:
    """Allocates a tensor at equal places on all ranks, so that collectives need no copy. Collective: every rank allocates alike.

    It is on the device of the group. The values are undefined. Its memory is used again after all ranks have freed it.
    """
    shape = shape_of(size[0] if len(size) == 1 else size)
    dtype = _dtype(dtype)
    block = _group(group)._calls.arena.allocate(nbytes_of(shape, dtype.itemsize))
    # A capsule, because of an object PyTorch asks for a synchronisation of streams.
    tensor = torch.from_dlpack(block.memory(dtype_name(dtype) if dtype in _DLPACK else "u8").__dlpack__())
    tensor = tensor if tensor.dtype == dtype else tensor.view(dtype)
    return tensor if len(shape) == 1 else tensor.view(shape)


@call
def all_gather_into_tensor(
    output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False, *, beside_compute: bool | None = None
) -> Work | None:
    """Gathers the tensor of every rank to `output_tensor`, as `torch.distributed.all_gather_into_tensor`."""
    return _start(group, async_op, "all-gather", input_tensor, output_tensor, beside_compute=beside_compute)


@call
def all_gather(
    tensor_list: list[Any], tensor: Any, group: Any = None, async_op: bool = False, *, beside_compute: bool | None = None
) -> Work | None:
    """Gathers the tensor of every rank to a list of tensors, whose sizes may differ, as `torch.distributed.all_gather`."""
    return calls.all_gather_list(_group(group), async_op, tensor_list, tensor, beside_compute=beside_compute)


@call
def broadcast(
    tensor: Any,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    beside_compute: bool | None = None,
) -> Work | None:
    """Copies the tensor of rank `src` to all ranks, as `torch.distributed.broadcast`."""
    root = _root("broadcast", group, src, group_src)
    return _start(group, async_op, "broadcast", tensor, tensor, root=root, beside_compute=beside_compute)


@call
def all_to_all_single(
    output: Any,
    input: Any,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Any = None,
    async_op: bool = False,
    *,
    beside_compute: bool | None = None,
) -> Work | None:
    """Sends part r of `input` to rank r, as `torch.distributed.all_to_all_single`. Split sizes are of dimension 0, and cost an exchange."""
    lens = output_split_sizes, input_split_sizes
    if torch.compiler.is_compiling():
        return _torch_ops.start(name_of(group), async_op, "all-to-all", input, output, lens=lens, beside_compute=beside_compute)
    return calls.all_to_all_single(_group(group), async_op, output, input, *lens, beside_compute=beside_compute)


@call
def gather(
    tensor: Any,
    gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    beside_compute: bool | None = None,
) -> Work | None:
    """Gathers the tensor of every rank to a list on rank `dst`, as `torch.distributed.gather`."""
    root = _root("gather", group, dst, group_dst)
    return calls.gather_list(_group(group), async_op, gather_list, tensor, root, beside_compute=beside_compute)


@call
def scatter(
    tensor: Any,
    scatter_list: list[Any] | None = None,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    beside_compute: bool | None = None,
) -> Work | None:
    """Sends tensor r of a list on rank `src` to rank r, as `torch.distributed.scatter`."""
    root = _root("scatter", group, src, group_src)
    return calls.scatter_list(_group(group), async_op, tensor, scatter_list, root, beside_compute=beside_compute)


@call
def reduce_scatter_tensor(
    output: Any, input: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False, *, beside_compute: bool | None = None
) -> Work | None:
    """Reduces the inputs and gives part r to rank r, as `torch.distributed.reduce_scatter_tensor`: SUM, AVG, MAX or MIN, in rank order.

    MAX and MIN are NaN if any element is, as `torch.maximum`. With op="max" and op="min", a number is preferred to a NaN, as by NCCL's kernels and `torch.fmax`.
    """
    return _start(group, async_op, "reduce-scatter", input, output, op=op, beside_compute=beside_compute)


@call
def reduce_scatter(
    output: Any,
    input_list: list[Any],
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    beside_compute: bool | None = None,
) -> Work | None:
    """Reduces tensor r of the lists of all ranks to rank r, as `torch.distributed.reduce_scatter`; the tensors of a list may differ in size.

    `op` is as in `reduce_scatter_tensor`.
    """
    return calls.reduce_scatter_list(_group(group), async_op, output, input_list, op, beside_compute=beside_compute)


@call
def all_reduce(
    tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False, *, beside_compute: bool | None = None
) -> Work | None:
    """Reduces a tensor in place on every rank, as `torch.distributed.all_reduce`: SUM, AVG, MAX or MIN, in rank order.

    MAX and MIN are NaN if any element is, as in `reduce_scatter_tensor`.
    """
    return _start(group, async_op, "all-reduce", tensor, tensor, op=op, beside_compute=beside_compute)


@call
def reduce(
    tensor: Any,
    dst: int | None = None,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    beside_compute: bool | None = None,
) -> Work | None:
    """Reduces a tensor in place on rank `dst`, as `torch.distributed.reduce`.

    MAX and MIN are NaN if any element is, as in `reduce_scatter_tensor`.
    """
    root = _root("reduce", group, dst, group_dst)
    return _start(group, async_op, "reduce", tensor, tensor, root=root, op=op, beside_compute=beside_compute)


@call
def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> None:
    """Waits on the host until all ranks have called it. `device_ids` has no effect."""
    if async_op:
        raise InvalidArgument("async_op is True, expected False: the barrier has no asynchronous form")
    _group(group).barrier()


@call
def all_gather_matmul(
    A_shard: Any, Bs: Any, gather_dim: int, group: Any = None, *, return_A: bool = True, streams: int = 2, chunks: int = 1
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Multiplies the gathered tensor with matrices, as `torch.ops.symm_mem.fused_all_gather_matmul`. Collective.

    Returns the tensors of all ranks, joined in dimension `gather_dim`, and its product with each of `Bs`. Copy engines gather, and the rows of each rank, or of each
    of `chunks` parts of them, are multiplied when they have arrived, on `streams` streams by turns. The products have the bits of those of these rows alone, which
    can differ from those of one large product, for which a library may choose another kernel. With `return_A=False`, the first result is None.

    If `A_shard` is this rank's part of a tensor of `empty` that has room for all ranks, nothing is copied, and that tensor is the first result.
    """
    return _torch_matmul.of(_group(group)).all_gather_matmul(A_shard, Bs, gather_dim, return_A, streams, chunks)


@call
def matmul_reduce_scatter(
    A: Any, B: Any, reduce_op: Any = "sum", scatter_dim: int = 0, group: Any = None, *, streams: int = 2, chunks: int = 2
) -> torch.Tensor:
    """Reduces the products of all ranks, as `torch.ops.symm_mem.fused_matmul_reduce_scatter`. Collective.

    Returns this rank's part in dimension `scatter_dim`. The rows for each rank, or each of `chunks` parts of them, are sent when they are multiplied, on `streams`
    streams by turns, and added in rank order. `reduce_op` is "sum" or "avg", or as in `reduce_scatter_tensor`.
    """
    return _torch_matmul.of(_group(group)).matmul_reduce_scatter(A, B, reduce_op, scatter_dim, streams, chunks)


@names_call
def report(group: Any = None) -> dict:
    """Returns what the calls did: calls with copies, the paths by which they ran, prepared operations, hits of the cache, and memory."""
    return _group(group).report()


def _start(group: Any, is_async: bool, collective: str, input: Any, output: Any, **options: Any) -> Work | None:
    if torch.compiler.is_compiling():
        return _torch_ops.start(name_of(group), is_async, collective, input, output, **options)
    return calls.start(_group(group), is_async, collective, input, output, **options)


def _group(group: Any) -> Group:
    found = resolved(group)
    return found if isinstance(found, Group) else group_of(found)


def _root(collective: str, group: Any, rank: int | None, group_rank: int | None) -> int:
    if group_rank is not None:
        return group_rank
    if isinstance(group, Group) or not dist.is_initialized():
        return 0 if rank is None else rank
    process_group = group or dist.group.WORLD
    try:
        return dist.get_group_rank(process_group, 0 if rank is None else rank)
    except Exception as error:
        refused = InvalidArgument(f"the root of the {collective} is {shown(rank)}, expected a rank of the process group: {error}")
        _group(group)._calls.tell_refusal(refused, collective)
        raise refused from None


def _dtype(dtype: Any) -> torch.dtype:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype or torch.get_default_dtype()
    return getattr(torch, TORCH_NAMES[dtype_name(dtype)])

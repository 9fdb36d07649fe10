"""Collectives on tensors, with the signatures of `torch.distributed`.

`group` is a `peerlane.Group`, or a `ProcessGroup` of PyTorch for which a group is opened at first use, or None for the default one. On a GPU, calls are
enqueued on the current stream, and with `async_op=True` on a stream of their own. Tensors must be contiguous. A tensor of `empty` is gathered without a
copy; parts of it and others are copied to memory of the library. Nothing here is differentiable. Collectives also take `beside_compute`, as
`peerlane.Group.prepare`.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
from pathlib import Path
from typing import Any

from peerlane import _native
from peerlane import group as default_group
from peerlane import open as open_group
from peerlane._arguments import shown, wholes
from peerlane._arrays import TORCH_NAMES, dtype_name
from peerlane._errors import Error, InvalidArgument, Unavailable, names_call
from peerlane._group import Group, nbytes_of, shape_of

_OLDEST = (2, 8)

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    raise Unavailable(f"peerlane.torch needs PyTorch {_OLDEST[0]}.{_OLDEST[1]} or newer: pip install torch ({error})") from None
if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _OLDEST:
    raise Unavailable(f"PyTorch is {torch.__version__}, expected {_OLDEST[0]}.{_OLDEST[1]} or newer: pip install --upgrade torch")

_DLPACK = {torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.uint8, torch.int8}
# The groups of process groups by name, with the options that opened them.
_groups: dict[str, tuple[Group, dict, Any]] = {}


@names_call
def group_of(process_group: Any = None, **options: Any) -> Group:
    """Returns the group of the ranks of a `ProcessGroup`; None is the default one. Collective when it is first called.

    `options` are those of `peerlane.open`. By default, ranks use the current GPU if PyTorch has one, and host memory otherwise.
    """
    process_group = _known(process_group)
    group, opened_with, known = _groups.get(process_group.group_name, (None, {}, None))
    if group is not None and known is not process_group:
        group.abandon()  # that of a process group that was destroyed
    elif group is not None and not group.is_closed:
        if options and options != opened_with:
            raise InvalidArgument(
                f"the group of this process group was opened with {opened_with}, expected that or no options, found {options}"
            )
        return group
    given = dict(options)
    ranks = dist.get_process_group_ranks(process_group)
    rank, seen = dist.get_rank(process_group), [None] * len(ranks)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    dist.all_gather_object(seen, f"{socket.gethostname()} {boot}", group=process_group)
    said: list[Any] = [None]
    hub = None
    if rank == 0:
        try:
            secret = secrets.token_hex(16)
            hub = _native.Hub(f"{'127.0.0.1' if len(set(seen)) == 1 else _own_address()}:0", len(ranks), secret)
            said = [(hub.address, secret)]
        except (Error, OSError, ValueError) as error:
            said = [error]
    dist.broadcast_object_list(said, src=ranks[0], group=process_group)
    if isinstance(said[0], Exception):
        raise Unavailable(f"rank {ranks[0]} cannot open the hub through which ranks find each other: {said[0]}")
    if "backend" not in options and "device" not in options and torch.cuda.is_available():
        options |= {"backend": "rocm" if torch.version.hip else "cuda", "device": torch.cuda.current_device()}
    elif "backend" not in options:
        options["backend"] = "host"
    address, secret = said[0]
    group = open_group(hub=hub or address, rank=rank, ranks=len(ranks), secret=secret, **options)
    _groups[process_group.group_name] = group, given, process_group
    return group


@names_call
def close(process_group: Any = None) -> None:
    """Closes the group of a `ProcessGroup`. Collective. Call it before `destroy_process_group`."""
    group, *_ = _groups.pop(_known(process_group).group_name, (None,))
    if group is not None:
        group.close()


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


@names_call
def all_gather_into_tensor(
    output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False, *, beside_compute: bool | None = None
) -> Work | None:
    """Gathers the tensor of every rank to `output_tensor`, as `torch.distributed.all_gather_into_tensor`."""
    return _call(group, async_op, "all-gather", input_tensor, output_tensor, beside_compute=beside_compute)


@names_call
def all_gather(
    tensor_list: list[Any], tensor: Any, group: Any = None, async_op: bool = False, *, beside_compute: bool | None = None
) -> Work | None:
    """Gathers the tensor of every rank to a list of tensors, whose sizes may differ, as `torch.distributed.all_gather`."""
    of = _group(group)
    with of._calls.checks("all-gather"):
        tensors = _check_list("tensor_list", tensor_list, tensor, of)
    counts = [each.numel() for each in tensors]
    flat = torch.empty(sum(counts), dtype=tensor.dtype, device=tensor.device)
    options: dict[str, Any] = {"beside_compute": beside_compute}
    if len(set(counts)) != 1:
        options["counts"] = counts
    return _to_list(of, _call(of, async_op, "all-gather", tensor, flat, **options), flat, tensors)


@names_call
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
    return _call(group, async_op, "broadcast", tensor, tensor, root=root, beside_compute=beside_compute)


@names_call
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
    if output_split_sizes is None and input_split_sizes is None:
        return _call(group, async_op, "all-to-all", input, output, beside_compute=beside_compute)
    of = _group(group)
    splits = []
    with of._calls.checks("all-to-all", has_splits=True):
        for name, tensor, lens in (("input", input, input_split_sizes), ("output", output, output_split_sizes)):
            if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0:
                raise InvalidArgument(f"{name} is {shown(tensor)}, expected a tensor of at least one dimension")
            row = math.prod(tensor.shape[1:])
            # An empty list is the same as none, as in PyTorch.
            given = [] if lens is None else wholes(f"{name}_split_sizes", lens)
            splits.append([length * row for length in given or [tensor.shape[0] // of.size] * of.size])
    return _call(of, async_op, "all-to-all", input, output, splits=tuple(splits), beside_compute=beside_compute)


@names_call
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
    root, of = _root("gather", group, dst, group_dst), _group(group)
    if of.rank != root:
        return _call(of, async_op, "gather", tensor, None, root=root, beside_compute=beside_compute)
    with of._calls.checks("gather"):
        numel = tensor.numel() if isinstance(tensor, torch.Tensor) else None
        tensors = _check_list("gather_list", gather_list, tensor, of, numel)
    flat = torch.empty(of.size * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    work = _call(of, async_op, "gather", tensor, flat, root=root, beside_compute=beside_compute)
    return _to_list(of, work, flat, tensors)


@names_call
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
    root, of = _root("scatter", group, src, group_src), _group(group)
    flat = None
    if of.rank == root:
        with of._calls.checks("scatter"):
            numel = tensor.numel() if isinstance(tensor, torch.Tensor) else None
            tensors = _check_list("scatter_list", scatter_list, tensor, of, numel)
        flat = torch.cat([each.reshape(-1) for each in tensors])
    return _call(of, async_op, "scatter", flat, tensor, root=root, beside_compute=beside_compute)


@names_call
def reduce_scatter_tensor(
    output: Any, input: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False, *, beside_compute: bool | None = None
) -> Work | None:
    """Reduces the inputs and gives part r to rank r, as `torch.distributed.reduce_scatter_tensor`: SUM, AVG, MAX or MIN, in rank order.

    MAX and MIN prefer a number to a NaN, as NCCL's kernels and `torch.fmax`, and unlike `torch.maximum`. Gloo's result depends on the order of ranks.
    """
    return _call(group, async_op, "reduce-scatter", input, output, op=op, beside_compute=beside_compute)


@names_call
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
    of = _group(group)
    with of._calls.checks("reduce-scatter"):
        tensors = _check_list("input_list", input_list, output, of)
        found, own = tensors[of.rank].numel(), output.numel()
        if found != own:
            raise InvalidArgument(f"input_list[{of.rank}] has {found} elements, expected {own} as in the output")
    counts = [each.numel() for each in tensors]
    options: dict[str, Any] = {"op": op, "beside_compute": beside_compute}
    if len(set(counts)) != 1:
        options["counts"] = counts
    flat = torch.cat([each.reshape(-1) for each in tensors])
    return _call(of, async_op, "reduce-scatter", flat, output, **options)


@names_call
def all_reduce(
    tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False, *, beside_compute: bool | None = None
) -> Work | None:
    """Reduces a tensor in place on every rank, as `torch.distributed.all_reduce`: SUM, AVG, MAX or MIN, in rank order.

    MAX and MIN prefer a number to a NaN, as in `reduce_scatter_tensor`.
    """
    return _call(group, async_op, "all-reduce", tensor, tensor, op=op, beside_compute=beside_compute)


@names_call
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

    MAX and MIN prefer a number to a NaN, as in `reduce_scatter_tensor`.
    """
    root = _root("reduce", group, dst, group_dst)
    return _call(group, async_op, "reduce", tensor, tensor, root=root, op=op, beside_compute=beside_compute)


@names_call
def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> None:
    """Waits on the host until all ranks have called it. `device_ids` has no effect."""
    if async_op:
        raise InvalidArgument("async_op is True, expected False: the barrier has no asynchronous form")
    _group(group).barrier()


@names_call
def report(group: Any = None) -> dict:
    """Returns what the calls did: prepared operations, hits of the cache, calls with copies, and memory."""
    return _group(group).report()


class Work(dist.Work):
    """Waits for a call that was made with `async_op=True`."""

    def __init__(self, future: Any, finish: Any = None):
        super().__init__()
        self._future, self._finish = future, finish

    def wait(self, timeout: Any = None) -> bool:
        """Waits for the call: on a GPU, the current stream does; otherwise the host, at most `timeout`, a `timedelta`."""
        seconds = timeout.total_seconds() if hasattr(timeout, "total_seconds") else timeout
        self._future.wait(seconds or None)
        self._complete()
        return True

    def is_completed(self) -> bool:
        """Returns whether the output is complete, without waiting."""
        is_done = self._future.done()
        if is_done:
            self._complete()
        return is_done

    def _complete(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


def _known(process_group: Any) -> Any:
    if process_group is None and not dist.is_initialized():
        raise InvalidArgument("PyTorch has no process group; call torch.distributed.init_process_group first, or give a peerlane.Group")
    return process_group or dist.group.WORLD


def _call(group: Any, async_op: bool, collective: str, input: Any, output: Any, **options: Any) -> Work | None:
    calls = _group(group)._calls
    try:
        for tensor in (input, output):
            if tensor is not None and not isinstance(tensor, torch.Tensor):
                raise InvalidArgument(f"{collective} got a {type(tensor).__name__}, expected a tensor")
        if "op" in options:
            options["reduction"] = _reduction(options.pop("op"))
    except InvalidArgument as error:
        calls.tell_refusal(error, collective, "splits" in options)
        raise
    done = calls.call(collective, input, output, wait=not async_op, **options)
    return Work(done) if async_op else None


def _to_list(group: Group, work: Work | None, flat: Any, tensors: list[Any]) -> Work | None:
    """Copies the parts of a flat output to a list of tensors, when the output is complete."""

    def copy() -> None:
        for part, tensor in zip(flat.split([each.numel() for each in tensors]), tensors):
            tensor.copy_(part.view(tensor.shape))

    def finish() -> None:
        # The stream on which the caller waits can be another one than that on which the tensors were allocated.
        streams = group._calls.streams
        if streams is None:
            copy()
        else:
            streams.copy_out(copy, flat, *tensors)

    if work is None:
        finish()
        return None
    work._finish = finish
    return work


def _check_list(name: str, tensors: Any, like: Any, group: Group, numel: int | None = None) -> list[Any]:
    """Returns a list of tensors, one for each rank, of the type of another tensor and of `numel` elements each, if that is given."""
    if not isinstance(like, torch.Tensor):
        raise InvalidArgument(f"tensor is a {type(like).__name__}, expected a tensor")
    if not isinstance(tensors, (list, tuple)) or len(tensors) != group.size:
        found = f"a list of {len(tensors)}" if isinstance(tensors, (list, tuple)) else shown(tensors)
        raise InvalidArgument(f"{name} is {found}, expected {group.size} tensors on rank {group.rank}")
    for place, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgument(f"{name}[{place}] is a {type(tensor).__name__}, expected a tensor")
        if tensor.dtype != like.dtype or tensor.device != like.device:
            text = f"{name}[{place}] has elements of {tensor.dtype} on {tensor.device}, expected {like.dtype} on {like.device} as in the tensor"
            raise InvalidArgument(text)
        if numel is not None and tensor.numel() != numel:
            raise InvalidArgument(f"{name}[{place}] has {tensor.numel()} elements, expected {numel} as in the tensor")
    return list(tensors)


def _group(group: Any) -> Group:
    if isinstance(group, Group):
        return group
    if group is None and not dist.is_initialized():
        return default_group()
    return group_of(group)


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


def _reduction(op: Any) -> str:
    names = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.AVG: "average", dist.ReduceOp.MAX: "max", dist.ReduceOp.MIN: "min"}
    for known, name in names.items():
        if op == known:
            return name
    raise InvalidArgument(f"op is {op}, expected SUM, AVG, MAX or MIN")


def _dtype(dtype: Any) -> torch.dtype:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype or torch.get_default_dtype()
    return getattr(torch, TORCH_NAMES[dtype_name(dtype)])


def _own_address() -> str:
    """Returns the address at which other hosts reach this one: that of the route to the launcher's host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", "192.0.2.1"), int(os.environ.get("MASTER_PORT", "29500"))))
        address = probe.getsockname()[0]
        if address.startswith("127."):  # the name of this host, as other hosts do not resolve it
            probe.connect(("192.0.2.1", 9))
            address = probe.getsockname()[0]
        return address

"""Makes the calls of `peerlane.torch` and of its process groups on tensors."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

from peerlane._arguments import shown, wholes
from peerlane._errors import InvalidArgument, Unavailable, names_call
from peerlane._group import Group

_OLDEST = (2, 8)

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    raise Unavailable(f"peerlane.torch needs PyTorch {_OLDEST[0]}.{_OLDEST[1]} or newer: pip install torch ({error})") from None
if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _OLDEST:
    raise Unavailable(f"PyTorch is {torch.__version__}, expected {_OLDEST[0]}.{_OLDEST[1]} or newer: pip install --upgrade torch")

# MAX and MIN are those of `torch.maximum` and `torch.minimum`, in which a NaN wins.
OPERATORS = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "average"),
    (dist.ReduceOp.MAX, "maximum"),
    (dist.ReduceOp.MIN, "minimum"),
)
_OPERATORS = dict(OPERATORS)
_NAMES = {"sum", "average", "max", "min", "maximum", "minimum"}
# The operators of booleans, which are bytes of 0 and 1.
OF_BOOLEANS = {"sum": "max", "max": "max", "maximum": "max", "min": "min", "minimum": "min"}
# The number of hardware queues that the streams of a process share. The driver reads it at the first use of a GPU; 8 is its default, and 32 its largest number.
_QUEUES, _QUEUES_MAX = "CUDA_DEVICE_MAX_CONNECTIONS", 32
# Tools such as Nsight Systems set this variable in the programs that they watch.
_HAS_NVTX_TOOL = "NVTX_INJECTION64_PATH" in os.environ


if not torch.cuda.is_initialized():
    os.environ.setdefault(_QUEUES, str(_QUEUES_MAX))


def warn_of_queues(group: Group) -> None:
    """Warns if streams share few hardware queues, in which a stream that waits for a peer holds up the others."""
    of_cuda = 2  # as DLPack numbers kinds of devices
    if group._native.memory_device[0] != of_cuda:
        return

    number = os.environ.get(_QUEUES)
    if number is None:
        why = f"peerlane was imported after the first use of a GPU; import it earlier, or set {_QUEUES}={_QUEUES_MAX}"
    elif number != str(_QUEUES_MAX):
        why = f"{_QUEUES} is {number}; set {_QUEUES_MAX}, unless another library needs that number"
    else:
        return
    warnings.warn(
        f"streams that wait for other ranks can hold up kernels in the same hardware queue, because {why}", RuntimeWarning, stacklevel=3
    )


def call(function: Callable) -> Callable:
    """Adds the name of a function to its errors, to the profiles of PyTorch and to the ranges of NVTX, as "peerlane::all_reduce"."""
    named, range_name = names_call(function), f"peerlane::{function.__name__}"
    is_range_marked = _HAS_NVTX_TOOL and torch.cuda.is_available()

    @wraps(function)
    def recorded(*arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*arguments, **options)

        if not torch.autograd._profiler_enabled() and not is_range_marked:
            return named(*arguments, **options)
        with torch.profiler.record_function(range_name):
            if not is_range_marked:
                return named(*arguments, **options)
            with torch.cuda.nvtx.range(range_name):
                return named(*arguments, **options)

    return recorded


def call_as(name: str) -> Callable:
    """Returns `call` for a function that programs know by another name."""

    def decorate(function: Callable) -> Callable:
        function.__name__ = name
        return call(function)

    return decorate


class Work(dist.Work):
    """Waits for a call that was made with `async_op=True`."""

    def __init__(self, future: Any, outputs: list[Any]):
        super().__init__()
        self._future, self._outputs = future, outputs
        # What the host does with the outputs of the call when it is complete.
        self._finish: Callable[[], None] | None = None

    def wait(self, timeout: Any = None) -> bool:
        """Waits for the call: on a GPU, the current stream does; otherwise the host, at most `timeout`, a `timedelta`."""
        seconds = timeout.total_seconds() if hasattr(timeout, "total_seconds") else timeout
        self._future.wait(seconds if seconds and seconds > 0 else None)
        self._complete()
        return True

    def is_completed(self) -> bool:
        """Returns whether the output is complete, without waiting."""
        is_done = self._future.done()
        if is_done:
            self._complete()
        return is_done

    def result(self) -> list[Any]:
        """Returns the tensors that the call writes, without waiting."""
        return self._outputs

    def get_future(self) -> torch.futures.Future:
        """Returns a future of the outputs: on a GPU at once, and otherwise when the host has waited for the call."""
        stream = getattr(self._future, "stream", None)
        if stream is None:
            self.wait()
            future: torch.futures.Future = torch.futures.Future()
            future.set_result(self._outputs)
            return future

        # The future records an event on the current stream, at which its waiters wait.
        future = torch.futures.Future(devices=[stream.device])
        with torch.cuda.stream(stream):
            future.set_result(self._outputs)
        return future

    def _complete(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


def start(group: Group, is_async: bool, collective: str, input: Any, output: Any, **options: Any) -> Work | None:
    """Starts a collective on tensors, and waits for it unless it is asynchronous."""
    calls, source, target = group._calls, input, output
    try:
        for tensor in (input, output):
            if tensor is not None and not isinstance(tensor, torch.Tensor):
                raise InvalidArgument(f"{collective} got a {type(tensor).__name__}, expected a tensor")

        if "op" in options:
            options["reduction"] = operator_name(options.pop("op"))
            first = output if input is None else input
            if first is not None and first.dtype == torch.bool:
                source, target, options["reduction"] = _booleans(input, output, options["reduction"])
    except InvalidArgument as error:
        calls.tell_refusal(error, collective, "splits" in options)
        raise

    done = calls.call(collective, source, target, wait=not is_async, **options)
    if not is_async:
        return None
    return Work(done, [] if output is None else [output])


def all_gather_list(group: Group, is_async: bool, outputs: Any, tensor: Any, **options: Any) -> Work | None:
    """Gathers the tensor of every rank to a list of tensors, whose sizes may differ."""
    with group._calls.checks("all-gather"):
        tensors = _check_list("tensor_list", outputs, tensor, group)

    counts = [each.numel() for each in tensors]
    flat = torch.empty(sum(counts), dtype=tensor.dtype, device=tensor.device)
    if len(set(counts)) != 1:
        options["counts"] = counts

    return _to_list(group, start(group, is_async, "all-gather", tensor, flat, **options), flat, tensors)


def all_to_all_single(
    group: Group, is_async: bool, output: Any, input: Any, output_lens: list[int] | None, input_lens: list[int] | None, **options: Any
) -> Work | None:
    """Sends part r of the input to rank r; the parts have lengths in dimension 0 if any are given."""
    if not output_lens and not input_lens:
        return start(group, is_async, "all-to-all", input, output, **options)

    splits = []
    with group._calls.checks("all-to-all", has_splits=True):
        for name, tensor, lens in (("input", input, input_lens), ("output", output, output_lens)):
            if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0:
                raise InvalidArgument(f"{name} is {shown(tensor)}, expected a tensor of at least one dimension")
            row = math.prod(tensor.shape[1:])

            # An empty list is the same as none, as in PyTorch.
            given = wholes(f"{name}_split_sizes", lens or [])
            splits.append([length * row for length in given or [tensor.shape[0] // group.size] * group.size])
    return start(group, is_async, "all-to-all", input, output, splits=tuple(splits), **options)


def all_to_all_list(group: Group, is_async: bool, outputs: Any, inputs: Any, **options: Any) -> Work | None:
    """Sends tensor r of a list to rank r; the tensors may differ in size."""
    with group._calls.checks("all-to-all", has_splits=True):
        like = inputs[0] if isinstance(inputs, (list, tuple)) and inputs else None
        sources = _check_list("input_tensor_list", inputs, like, group)
        targets = _check_list("output_tensor_list", outputs, like, group)

    source = torch.cat([each.reshape(-1) for each in sources])
    splits = [each.numel() for each in sources], [each.numel() for each in targets]
    flat = torch.empty(sum(splits[1]), dtype=source.dtype, device=source.device)
    return _to_list(group, start(group, is_async, "all-to-all", source, flat, splits=splits, **options), flat, targets)


def gather_list(group: Group, is_async: bool, outputs: Any, tensor: Any, root: int, **options: Any) -> Work | None:
    """Gathers the tensor of every rank to a list of tensors on the root."""
    if group.rank != root:
        return start(group, is_async, "gather", tensor, None, root=root, **options)

    with group._calls.checks("gather"):
        numel = tensor.numel() if isinstance(tensor, torch.Tensor) else None
        tensors = _check_list("gather_list", outputs, tensor, group, numel)

    flat = torch.empty(group.size * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    return _to_list(group, start(group, is_async, "gather", tensor, flat, root=root, **options), flat, tensors)


def scatter_list(group: Group, is_async: bool, tensor: Any, inputs: Any, root: int, **options: Any) -> Work | None:
    """Sends tensor r of a list on the root to rank r."""
    flat = None
    if group.rank == root:
        with group._calls.checks("scatter"):
            numel = tensor.numel() if isinstance(tensor, torch.Tensor) else None
            tensors = _check_list("scatter_list", inputs, tensor, group, numel)
        flat = torch.cat([each.reshape(-1) for each in tensors])
    return start(group, is_async, "scatter", flat, tensor, root=root, **options)


def reduce_scatter_list(group: Group, is_async: bool, output: Any, inputs: Any, op: Any, **options: Any) -> Work | None:
    """Reduces tensor r of the lists of all ranks to rank r; the tensors of a list may differ in size."""
    with group._calls.checks("reduce-scatter"):
        tensors = _check_list("input_list", inputs, output, group)
        found, own = tensors[group.rank].numel(), output.numel()
        if found != own:
            raise InvalidArgument(f"input_list[{group.rank}] has {found} elements, expected {own} as in the output")

    counts = [each.numel() for each in tensors]
    if len(set(counts)) != 1:
        options["counts"] = counts

    flat = torch.cat([each.reshape(-1) for each in tensors])
    return start(group, is_async, "reduce-scatter", flat, output, op=op, **options)


def operator_name(op: Any) -> str:
    """Returns the name of an operator of `torch.distributed`, or of a string."""
    if isinstance(op, str):
        name = {"avg": "average"}.get(op.lower(), op.lower())
        if name in _NAMES:
            return name
    else:
        # A `ReduceOp` has one of the constants, whose comparison costs less.
        kind = getattr(op, "op", op)
        if kind in _OPERATORS:
            return _OPERATORS[kind]
        op = getattr(kind, "name", op)

    raise InvalidArgument(
        f'op is {op}, expected SUM, AVG, MAX, MIN, or "max" or "min" for those that prefer a number to a NaN; '
        "use a process group of NCCL or Gloo for others"
    )


def _booleans(input: Any, output: Any, name: str) -> tuple[Any, Any, str]:
    """Returns the bytes of boolean tensors, with the operator that reduces them as booleans."""
    if name not in OF_BOOLEANS:
        raise InvalidArgument(f"op is {name} of booleans, expected SUM, MAX or MIN")

    source, target = (None if tensor is None else tensor.view(torch.uint8) for tensor in (input, output))
    return source, source if input is output else target, OF_BOOLEANS[name]


def _to_list(group: Group, work: Work | None, flat: Any, tensors: list[Any]) -> Work | None:
    """Copies the parts of a flat output to a list of tensors, when the output is complete."""

    def copy() -> None:
        for part, tensor in zip(flat.split([each.numel() for each in tensors]), tensors):
            tensor.copy_(part.view(tensor.shape))

    if work is not None:
        work._outputs = tensors

    streams = group._calls.streams
    if streams is None:
        if work is None:
            copy()
        else:
            work._finish = copy
        return work

    # On a GPU, the copies follow the call on its stream, which can be another one than that on which the tensors were allocated.
    if work is None:
        streams.copy_out(copy, flat, *tensors)
    else:
        work._future.then(lambda: streams.copy_out(copy, flat, *tensors))
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

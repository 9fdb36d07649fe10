"""The ops `torch.ops.peerlane`, which `torch.compile` traces and graphs of CUDA record.

| op | returns |
| --- | --- |
| `all_gather(input, group)` | the inputs of all ranks, one after the other in dimension 0 |
| `reduce_scatter(input, op, group)` | the part of this rank in dimension 0 of the reduced inputs |
| `all_reduce(input, op, group)` | the reduced inputs |
| `all_to_all(input, output_split_sizes, input_split_sizes, group)` | part r of the input of each rank, which is its part for this rank r |
| `broadcast(input, root, group)` | the input of the root |
| `all_gather_into(output, input, group)`, `reduce_scatter_into(output, input, op, group)`, `all_to_all_into(output, input, …)` | nothing |
| `all_reduce_(tensor, op, group)`, `broadcast_(tensor, root, group)` | nothing |

`group` is a name from `peerlane.torch.name_of`, `op` one of "sum", "average", "maximum", "minimum", "max" and "min", and `root` a rank of the group. Calls are
enqueued on the current stream. The first four are differentiable with "sum" and "average": the gradient of an all-gather is the sum of those of all ranks.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from peerlane import _torch as calls
from peerlane._arguments import shown
from peerlane._errors import InvalidArgument
from peerlane._group import Group
from peerlane._torch import dist, torch
from peerlane._torch_group import group_of, resolved

_SPLITS = "SymInt[]? output_split_sizes, SymInt[]? input_split_sizes"
_SCHEMAS = (
    "all_gather(Tensor input, str group) -> Tensor",
    "reduce_scatter(Tensor input, str op, str group) -> Tensor",
    "all_reduce(Tensor input, str op, str group) -> Tensor",
    f"all_to_all(Tensor input, {_SPLITS}, str group) -> Tensor",
    "broadcast(Tensor input, int root, str group) -> Tensor",
    "all_gather_into(Tensor(a!) output, Tensor input, str group) -> ()",
    "reduce_scatter_into(Tensor(a!) output, Tensor input, str op, str group) -> ()",
    f"all_to_all_into(Tensor(a!) output, Tensor input, {_SPLITS}, str group) -> ()",
    "all_reduce_(Tensor(a!) tensor, str op, str group) -> ()",
    "broadcast_(Tensor(a!) tensor, int root, str group) -> ()",
)
_library = torch.library.Library("peerlane", "DEF")
# Groups that no process group has, by name, as long as the program has them.
_named: weakref.WeakValueDictionary[str, Group] = weakref.WeakValueDictionary()
_numbers = itertools.count()


@torch.compiler.assume_constant_result
def name_of(group: Any = None) -> str:
    """Returns the name of a group for `torch.ops.peerlane`: a `ProcessGroup`, a `peerlane.Group`, or None for the default one."""
    found = resolved(group)
    if not isinstance(found, Group):
        return found.group_name

    for name, other in _named.items():
        if other is found:
            return name
    name = f"peerlane {next(_numbers)}"
    _named[name] = found
    return name


def _traced_name(op: Any) -> str:
    """Returns what `operator_name` returns, in a function that `torch.compile` traces, which hashes and compares no constants of C++."""
    for constant, name in calls.OPERATORS:
        if op is constant:
            return name
    return calls.operator_name(op)


def start(name: str, is_async: bool, collective: str, input: Any, output: Any, **options: Any) -> None:
    """Calls the op of a collective, in a function that `torch.compile` traces."""
    if is_async:
        raise InvalidArgument("async_op is True, expected False in a function that torch.compile traces")
    if options.pop("beside_compute", None) is not None:
        raise InvalidArgument("beside_compute is given, expected none in a function that torch.compile traces; set it for the group")

    ops = torch.ops.peerlane
    op = _traced_name(options.get("op", "sum"))
    if collective == "all-gather":
        ops.all_gather_into(output, input, name)
    elif collective == "reduce-scatter":
        ops.reduce_scatter_into(output, input, op, name)
    elif collective == "all-to-all":
        ops.all_to_all_into(output, input, *options["lens"], name)
    elif collective == "all-reduce":
        ops.all_reduce_(input, op, name)
    elif collective == "broadcast":
        ops.broadcast_(input, options["root"], name)
    else:
        raise InvalidArgument(f"the {collective} has no op, expected all-gather, reduce-scatter, all-to-all, all-reduce or broadcast")


def _group(name: str) -> Group:
    group = _named.get(name)
    return group if group is not None else group_of(dist.distributed_c10d._resolve_process_group(name))


def _size(name: str) -> int:
    """Returns the number of ranks of a group, which is not opened for it."""
    group = _named.get(name)
    return group.size if group is not None else dist.distributed_c10d._resolve_process_group(name).size()


# The shapes of outputs


def _gathered(input: Any, group: str) -> Any:
    return input.new_empty((_size(group) * (input.shape[0] if input.dim() else 1), *input.shape[1:]))


def _scattered(input: Any, op: str, group: str) -> Any:
    size, rows = _size(group), input.shape[0] if input.dim() else 0
    if rows % size or not input.dim():
        raise InvalidArgument(f"reduce_scatter: input has the shape {tuple(input.shape)}, expected rows for {size} ranks in dimension 0")
    return input.new_empty((rows // size, *input.shape[1:]))


def _exchanged(input: Any, output_split_sizes: Any, input_split_sizes: Any, group: str) -> Any:
    if not output_split_sizes:
        return input.new_empty(input.shape)
    return input.new_empty((sum(output_split_sizes), *input.shape[1:]))


def _like(input: Any, *others: Any) -> Any:
    return input.new_empty(input.shape)


def _nothing(*arguments: Any) -> None:
    return None


# The ops


def _all_gather_into(output: Any, input: Any, group: str) -> None:
    calls.start(_group(group), False, "all-gather", input, output)


def _reduce_scatter_into(output: Any, input: Any, op: str, group: str) -> None:
    calls.start(_group(group), False, "reduce-scatter", input, output, op=op)


def _all_to_all_into(output: Any, input: Any, output_split_sizes: Any, input_split_sizes: Any, group: str) -> None:
    calls.all_to_all_single(_group(group), False, output, input, output_split_sizes, input_split_sizes)


def _all_reduce_(tensor: Any, op: str, group: str) -> None:
    calls.start(_group(group), False, "all-reduce", tensor, tensor, op=op)


def _broadcast_(tensor: Any, root: int, group: str) -> None:
    calls.start(_group(group), False, "broadcast", tensor, tensor, root=root)


def _all_gather(input: Any, group: str) -> Any:
    output = _gathered(input, group)
    _all_gather_into(output, input.contiguous(), group)
    return output


def _reduce_scatter(input: Any, op: str, group: str) -> Any:
    output = _scattered(input, op, group)
    _reduce_scatter_into(output, input.contiguous(), op, group)
    return output


def _all_reduce(input: Any, op: str, group: str) -> Any:
    output = _like(input)
    calls.start(_group(group), False, "all-reduce", input.contiguous(), output, op=op)
    return output


def _all_to_all(input: Any, output_split_sizes: Any, input_split_sizes: Any, group: str) -> Any:
    output = _exchanged(input, output_split_sizes, input_split_sizes, group)
    _all_to_all_into(output, input.contiguous(), output_split_sizes, input_split_sizes, group)
    return output


def _broadcast(input: Any, root: int, group: str) -> Any:
    output = input.clone(memory_format=torch.contiguous_format)
    _broadcast_(output, root, group)
    return output


# Gradients


def _keep_group(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.group = inputs[-1]


def _keep_op(ctx: Any, inputs: tuple, output: Any) -> None:
    _, ctx.op, ctx.group = inputs
    if calls.operator_name(ctx.op) not in ("sum", "average"):
        raise InvalidArgument(f"op is {shown(ctx.op)}, expected sum or average for an input that needs a gradient")


def _keep_splits(ctx: Any, inputs: tuple, output: Any) -> None:
    _, *ctx.splits, ctx.group = inputs


def _all_gather_gradient(ctx: Any, gradient: Any) -> tuple:
    return torch.ops.peerlane.reduce_scatter(gradient, "sum", ctx.group), None


def _reduce_scatter_gradient(ctx: Any, gradient: Any) -> tuple:
    gathered = torch.ops.peerlane.all_gather(gradient, ctx.group)
    return gathered / _size(ctx.group) if calls.operator_name(ctx.op) == "average" else gathered, None, None


def _all_reduce_gradient(ctx: Any, gradient: Any) -> tuple:
    return torch.ops.peerlane.all_reduce(gradient, ctx.op, ctx.group), None, None


def _all_to_all_gradient(ctx: Any, gradient: Any) -> tuple:
    output_split_sizes, input_split_sizes = ctx.splits
    return torch.ops.peerlane.all_to_all(gradient, input_split_sizes, output_split_sizes, ctx.group), None, None, None


def _define() -> None:
    """Registers the ops: their kernels, the shapes of their outputs, and their gradients."""
    kernels = {
        "all_gather": (_all_gather, _gathered),
        "reduce_scatter": (_reduce_scatter, _scattered),
        "all_reduce": (_all_reduce, _like),
        "all_to_all": (_all_to_all, _exchanged),
        "broadcast": (_broadcast, _like),
        "all_gather_into": (_all_gather_into, _nothing),
        "reduce_scatter_into": (_reduce_scatter_into, _nothing),
        "all_to_all_into": (_all_to_all_into, _nothing),
        "all_reduce_": (_all_reduce_, _nothing),
        "broadcast_": (_broadcast_, _nothing),
    }
    gradients = {
        "all_gather": (_all_gather_gradient, _keep_group),
        "reduce_scatter": (_reduce_scatter_gradient, _keep_op),
        "all_reduce": (_all_reduce_gradient, _keep_op),
        "all_to_all": (_all_to_all_gradient, _keep_splits),
    }
    for schema in _SCHEMAS:
        name = schema.split("(")[0]
        kernel, shape = kernels[name]
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        for device in ("CPU", "CUDA"):
            _library.impl(name, kernel, device)
        torch.library.register_fake(f"peerlane::{name}", shape, lib=_library)
        if name in gradients:
            backward, setup = gradients[name]
            torch.library.register_autograd(f"peerlane::{name}", backward, setup_context=setup, lib=_library)


_define()

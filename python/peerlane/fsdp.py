"""All-gathers of parameters on copy engines for FSDP2 (`torch.distributed.fsdp.fully_shard`).

    for block in model.layers:
        fully_shard(block)
    fully_shard(model)
    gather = peerlane.fsdp.enable(model)
    ...
    print(gather.report())

Gradients are reduced by PyTorch as before, unless `reduce_scatter=True`. Where Peerlane cannot serve a call, PyTorch's own does, with one warning that
says why; the report counts these calls.
"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import peerlane.torch
from peerlane._arguments import flag, whole
from peerlane._arrays import CPU
from peerlane._errors import InvalidArgument, Unavailable
from peerlane._group import Group
from peerlane._pool import Pool, default_limit
from peerlane._torch import dist, operator_name, torch, warn_of_queues


def enable(
    model: torch.nn.Module,
    process_group: Any = None,
    *,
    reduce_scatter: bool = False,
    beside_compute: bool = True,
    memory_limit: int | None = None,
    **options: Any,
) -> AllGather:
    """Sets the all-gather of all FSDP2 modules of a model. Collective.

    `process_group` is that over which parameters are sharded, by default that of all ranks; `options` are those of `peerlane.torch.group_of`. With
    `reduce_scatter`, gradients are reduced by Peerlane too, in rank order. These calls run beside kernels of the model, so that they take few compute units;
    with `beside_compute=False`, they take what is fastest alone. Other calls of the group keep its setting.

    Gathers take memory for as many outputs as the model has at once, and so do reductions for their inputs, each at most `memory_limit` bytes, by default a
    quarter of the memory of the GPU. The first steps show how many these are; the report says what was taken.

    Raises `Unavailable` if PyTorch has no custom all-gathers, and `InvalidArgument` if the model has no FSDP2 module.
    """
    flag("beside_compute", beside_compute)
    if memory_limit is not None:
        memory_limit = whole("memory_limit", memory_limit)
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError:
        raise Unavailable(f"PyTorch {torch.__version__} has no FSDP2: pip install --upgrade torch") from None
    for name in ("set_custom_all_gather", "set_custom_reduce_scatter")[: 1 + reduce_scatter]:
        if not hasattr(FSDPModule, name):
            raise Unavailable(f"FSDP2 of PyTorch {torch.__version__} has no {name}: pip install --upgrade torch")
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise InvalidArgument("the model has no FSDP2 module, expected one; call fully_shard first")
    group = peerlane.torch.group_of(process_group, **options)
    warn_of_queues(group)
    gather = AllGather(group, process_group, beside_compute, memory_limit)
    for module in modules:
        module.set_custom_all_gather(gather)
        if reduce_scatter:
            module.set_custom_reduce_scatter(gather.reduce_scatter)
    return gather


class _Hook:
    """Checks whether Peerlane can serve a call, and counts the calls that PyTorch serves instead."""

    def __init__(self, group: Group, process_group: Any = None, beside_compute: bool = True, memory_limit: int | None = None):
        self.group, self.ranks = group, dist.get_process_group_ranks(process_group or dist.group.WORLD)
        # Per call, because others use the group too.
        self.beside_compute = beside_compute
        self.calls = 0
        self.is_on_cpu = group._native.memory_device == CPU
        self.pool = Pool(group, default_limit(group) if memory_limit is None else memory_limit)
        # Why Peerlane cannot serve a process group on a kind of device, or None, by group and kind.
        self.reasons: dict[tuple[Any, str], str | None] = {}
        # Calls that PyTorch has served, by reason.
        self.fallbacks: Counter[str] = Counter()

    def from_pool(self, size: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        """Returns memory of the group, or None on all ranks if its calls cannot serve the model or the memory is exhausted."""
        # The ranks of a model that others shard need not make equal calls.
        serves_none = self.fallbacks and not self.calls
        if serves_none or (device.type == "cpu") != self.is_on_cpu:
            return None
        return self.pool.allocate(size, dtype)

    def reason(self, process_group: Any, tensor: torch.Tensor) -> str | None:
        """Returns why Peerlane cannot serve a call, equal on all ranks."""
        key = (process_group, tensor.device.type)
        if key not in self.reasons:
            self.reasons[key] = self._reason(process_group, tensor)
        return self.reasons[key]

    def _reason(self, process_group: Any, tensor: torch.Tensor) -> str | None:
        if (ranks := dist.get_process_group_ranks(process_group)) != self.ranks:
            return f"the module is sharded over the ranks {ranks}, and the group has {self.ranks}"
        kind = tensor.device.type
        if (kind == "cpu") != self.is_on_cpu:
            return f"the parameters are on the device {kind}, and the group is on {self.group.selection}"
        return None

    def fall_back(self, reason: str) -> None:
        """Counts a call that PyTorch serves, and warns once for each reason."""
        if not self.fallbacks[reason]:
            warnings.warn(f"FSDP2 uses PyTorch's own collective, because {reason}", RuntimeWarning, stacklevel=4)
        self.fallbacks[reason] += 1

    def report(self) -> dict:
        """Returns the calls that Peerlane and PyTorch have served, with the reasons, the memory of these calls, and the report of the group."""
        return {"calls": self.calls, "fallbacks": dict(self.fallbacks), "memory": self.pool.report(), "group": self.group.report()}


class AllGather(_Hook):
    """The all-gather of FSDP2 modules, for `FSDPModule.set_custom_all_gather`. `enable` makes and sets one."""

    def __init__(self, group: Group, process_group: Any = None, beside_compute: bool = True, memory_limit: int | None = None):
        super().__init__(group, process_group, beside_compute, memory_limit)
        self.reduce_scatter = ReduceScatter(group, process_group, beside_compute, memory_limit)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocates the output of a gather, in which each rank fills its block."""
        tensor = self.from_pool(size, dtype, device)
        return torch.empty(*size, dtype=dtype, device=device) if tensor is None else tensor

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False) -> Any:
        """Gathers the blocks of all ranks."""
        reason = self.reason(group, output_tensor)
        nbytes = output_tensor.numel() * output_tensor.element_size()
        if reason is None and not self.group._native.has_place(output_tensor.data_ptr(), nbytes):
            reason = "the output is not in memory of the group: that is exhausted, as far as memory_limit permits, or `allocate` did not allocate it"
        if reason is not None:
            self.fall_back(reason)
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)
        self.calls += 1
        return peerlane.torch.all_gather_into_tensor(output_tensor, input_tensor, self.group, async_op, beside_compute=self.beside_compute)


class ReduceScatter(_Hook):
    """The reduce-scatter of FSDP2 modules, for `FSDPModule.set_custom_reduce_scatter`."""

    # Whether the input of the next call is allocated.
    has_input = False

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocates the input of a reduction, and then its output, which lives as long as the gradients and is copied."""
        is_input, self.has_input = not self.has_input, False
        tensor = self.from_pool(size, dtype, device) if is_input else None
        if tensor is None:
            tensor = torch.empty(*size, dtype=dtype, device=device)
        self.has_input = is_input
        return tensor

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        """Reduces the gradients of all ranks and gives each rank its block."""
        reason = self.reason(group, input_tensor)
        try:
            operator_name(op)
        except InvalidArgument as error:
            reason = reason or str(error)
        if reason is not None:
            self.fall_back(reason)
            return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group=group, async_op=async_op)
        self.calls += 1
        return peerlane.torch.reduce_scatter_tensor(
            output_tensor, input_tensor, op, self.group, async_op, beside_compute=self.beside_compute
        )

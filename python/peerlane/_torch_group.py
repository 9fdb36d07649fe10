"""The process groups of `torch.distributed` whose backend is "peerlane"."""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partialmethod
from pathlib import Path
from typing import Any

from peerlane import _native
from peerlane import _torch as calls
from peerlane import group as default_group
from peerlane import open as open_group
from peerlane._arguments import shown
from peerlane._errors import Error, InvalidArgument, Timeout, Unavailable, names_call
from peerlane._group import Group
from peerlane._torch import Work, call, call_as, dist, torch

NAME = "peerlane"
_MODULE = dist.distributed_c10d
# The options of calls whose caller gives none, such as C++.
_ALL_REDUCE, _BROADCAST, _OTHER = _MODULE.AllreduceOptions(), _MODULE.BroadcastOptions(), _MODULE.AllgatherOptions()
_REDUCE_SCATTER = _MODULE.ReduceScatterOptions()
# How long ranks wait for each other at the first call for a process group of another backend.
_START_TIMEOUT = 120.0
# The groups of process groups of other backends by name, with the options that opened them.
_groups: dict[str, tuple[Group, dict, Any]] = {}
# How often each store has served to open a group, which is the same on all ranks.
_openings: dict[str, int] = {}


class ProcessGroup(dist.ProcessGroup):
    """Serves the collectives of `torch.distributed` with a group of Peerlane, and those of tensors on the CPU beside GPUs with Gloo.

    The group is opened by the first collective on a tensor of its device. A collective that neither has raises an error that says what to do.
    """

    # What PyTorch asks the backend of a device, which is the process group here.
    supports_splitting = supports_coalescing = supports_time_estimate = supports_tensor_alloc = supports_shrinking = False
    bound_device_id = None

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, options: dict):
        # The only constructor whose methods C++ can find in a subclass.
        super().__init__(rank, size)
        self._store, self._rank, self._size, self._timeout, self._options = store, rank, size, timeout, options
        self._name, self._description = "", ""
        self._group: Group | None = None
        self._gloo: Any = None
        self._is_shut_down = False
        # Whether Peerlane serves tensors of GPUs, once PyTorch has told which backend each device has.
        self._is_on_gpu: bool | None = None
        self._coalesced: list[Work] | None = None

    # What PyTorch asks and tells

    group_name = property(lambda self: self._name)
    group_desc = property(lambda self: self._description)
    options = property(lambda self: self._options)

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def getBackendName(self) -> str:
        """Returns the name of the backend."""
        return NAME

    def name(self) -> str:
        """Returns the name of the backend."""
        return NAME

    def _get_backend(self, device: Any) -> Any:
        return self

    def _set_sequence_number_for_group(self) -> None:
        pass

    def size(self) -> int:
        """Returns the number of ranks."""
        return self._size

    def rank(self) -> int:
        """Returns the rank of this process in the group."""
        return self._rank

    # Its group, and Gloo

    def group(self, device: int | None = None) -> Group:
        """Returns the group of Peerlane. Collective when it is first called, which opens the group, on a GPU by its number."""
        self._check_in_use()
        if self._group is None:
            place = of_gpu(device) if self._serves_gpus() else {"backend": "host"}
            options = {"timeout": self._timeout.total_seconds()} | place | self._options
            self._group = open_through(dist.PrefixStore(NAME, self._store), self._rank, self._size, self._timeout, options)
        return self._group

    def _check_in_use(self) -> None:
        if self._is_shut_down:
            raise InvalidArgument(f"the process group {self._name!r} was destroyed, expected one in use; make a new one")

    def _serves_gpus(self) -> bool:
        if self._is_on_gpu is None:
            # Such as "cpu:gloo,cuda:peerlane".
            served = dict(pair.split(":") for pair in dist.get_backend_config(self).split(","))
            mine = {device for device, backend in served.items() if backend == NAME}
            self._is_on_gpu = "cuda" in mine and (torch.cuda.is_available() or "cpu" not in mine)
        return self._is_on_gpu

    def _of(self, tensor: Any, collective: str) -> Group | None:
        """Returns the group for a tensor of a call, or None if Gloo serves it."""
        if not isinstance(tensor, torch.Tensor):
            raise self._refusal(f"the call got a {type(tensor).__name__}, expected a tensor", collective)
        device = tensor.device
        if device.type == "cpu":
            return None if self._serves_gpus() else self.group()

        if device.type != "cuda" or not self._serves_gpus():
            served = "GPUs, and Gloo those of the CPU" if self._serves_gpus() else "the CPU"
            text = f"the tensor is on {device}, expected one of the devices of this process group: Peerlane serves {served}"
            raise self._refusal(text, collective)

        if self._group is not None and device.index != self._group.device:
            text = f"the tensor is on {device}, expected cuda:{self._group.device}, the GPU of this rank's first collective in the group"
            raise self._refusal(text, collective)
        return self.group(device.index)

    def _one(self, values: list[Any], collective: str) -> Any:
        """Returns the element of a list that has one: a process that had several GPUs could give one tensor for each."""
        if len(values) != 1:
            raise self._refusal(f"the call has {len(values)} tensors, expected 1: each rank has one GPU", collective)
        return values[0]

    def _refusal(self, text: str, collective: str) -> InvalidArgument:
        """Tells the other ranks that this rank refuses a call, if there is a group, and returns the error."""
        error = InvalidArgument(text)
        if self._group is not None:
            self._group._calls.tell_refusal(error, collective)
        return error

    def _by_gloo(self, method: str, *arguments: Any) -> Any:
        """Calls a method of a process group of Gloo, which is made at the first call of all ranks."""
        self._check_in_use()
        if self._gloo is None:
            store = dist.PrefixStore("gloo", self._store)
            backend = dist.ProcessGroupGloo(store, self._rank, self._size, timeout=self._timeout)
            self._gloo = dist.ProcessGroup(store, self._rank, self._size)
            self._gloo._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
            self._gloo._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        return getattr(self._gloo, method)(*arguments)

    # Collectives

    def _start(self, group: Group, options: Any, collective: str, input: Any, output: Any, **others: Any) -> Work | None:
        return self._kept(calls.start(group, is_async(options), collective, input, output, **others))

    def _kept(self, work: Work | None) -> Work | None:
        if self._coalesced is not None and work is not None:
            self._coalesced.append(work)
        return work

    @call_as("all_reduce")
    def allreduce(self, tensors: list[Any], opts: Any = _ALL_REDUCE) -> Any:
        """Reduces a tensor in place on every rank."""
        tensor = self._one(tensors, "all-reduce")
        group = self._of(tensor, "all-reduce")
        if group is None or self._is_for_gloo(tensor, opts.reduceOp):
            return self._by_gloo("allreduce", tensors, opts)
        return self._start(group, opts, "all-reduce", tensor, tensor, op=opts.reduceOp)

    @call_as("all_gather_into_tensor")
    def _allgather_base(self, output: Any, input: Any, opts: Any = _OTHER) -> Any:
        group = self._of(input, "all-gather")
        if group is None:
            return self._by_gloo("_allgather_base", output, input, opts)
        return self._start(group, opts, "all-gather", input, output)

    @call_as("reduce_scatter_tensor")
    def _reduce_scatter_base(self, output: Any, input: Any, opts: Any = _REDUCE_SCATTER) -> Any:
        group = self._of(input, "reduce-scatter")
        if group is None or self._is_for_gloo(input, opts.reduceOp):
            return self._by_gloo("_reduce_scatter_base", output, input, opts)
        return self._start(group, opts, "reduce-scatter", input, output, op=opts.reduceOp)

    @call_as("all_to_all_single")
    def alltoall_base(self, output: Any, input: Any, output_lens: list[int], input_lens: list[int], opts: Any = _OTHER) -> Any:
        """Sends part r of the input to rank r; the parts have lengths in dimension 0 if any are given."""
        group = self._of(input, "all-to-all")
        if group is None:
            return self._by_gloo("alltoall_base", output, input, output_lens, input_lens, opts)
        return self._kept(calls.all_to_all_single(group, is_async(opts), output, input, output_lens, input_lens))

    @call_as("all_to_all")
    def alltoall(self, outputs: list[Any], inputs: list[Any], opts: Any = _OTHER) -> Any:
        """Sends tensor r of a list to rank r."""
        group = self._of(inputs[0], "all-to-all")
        if group is None:
            return self._by_gloo("alltoall", outputs, inputs, opts)
        return self._kept(calls.all_to_all_list(group, is_async(opts), outputs, inputs))

    @call
    def broadcast(self, tensors: list[Any], opts: Any = _BROADCAST) -> Any:
        """Copies the tensor of the root to all ranks."""
        tensor = self._one(tensors, "broadcast")
        group = self._of(tensor, "broadcast")
        if group is None:
            return self._by_gloo("broadcast", tensors, opts)
        return self._start(group, opts, "broadcast", tensor, tensor, root=opts.rootRank)

    @call
    def reduce(self, tensors: list[Any], opts: Any) -> Any:
        """Reduces a tensor in place on the root."""
        tensor = self._one(tensors, "reduce")
        group = self._of(tensor, "reduce")
        if group is None or self._is_for_gloo(tensor, opts.reduceOp):
            return self._by_gloo("reduce", tensors, opts)
        return self._start(group, opts, "reduce", tensor, tensor, root=opts.rootRank, op=opts.reduceOp)

    @call_as("all_gather")
    def allgather(self, outputs: list[list[Any]], inputs: list[Any], opts: Any = _OTHER) -> Any:
        """Gathers the tensor of every rank to a list of tensors, whose sizes may differ."""
        output, tensor = self._one(outputs, "all-gather"), self._one(inputs, "all-gather")
        group = self._of(tensor, "all-gather")
        if group is None:
            return self._by_gloo("allgather", outputs, inputs, opts)
        return self._kept(calls.all_gather_list(group, is_async(opts), output, tensor))

    @call
    def reduce_scatter(self, outputs: list[Any], inputs: list[list[Any]], opts: Any = _REDUCE_SCATTER) -> Any:
        """Reduces tensor r of the lists of all ranks to rank r."""
        output, tensors = self._one(outputs, "reduce-scatter"), self._one(inputs, "reduce-scatter")
        group = self._of(output, "reduce-scatter")
        if group is None or self._is_for_gloo(output, opts.reduceOp):
            return self._by_gloo("reduce_scatter", outputs, inputs, opts)
        return self._kept(calls.reduce_scatter_list(group, is_async(opts), output, tensors, opts.reduceOp))

    @call
    def gather(self, outputs: list[list[Any]], inputs: list[Any], opts: Any) -> Any:
        """Gathers the tensor of every rank to a list on the root."""
        tensor = self._one(inputs, "gather")
        group = self._of(tensor, "gather")
        if group is None:
            return self._by_gloo("gather", outputs, inputs, opts)
        output = outputs[0] if outputs else None
        return self._kept(calls.gather_list(group, is_async(opts), output, tensor, opts.rootRank))

    @call
    def scatter(self, outputs: list[Any], inputs: list[list[Any]], opts: Any) -> Any:
        """Sends tensor r of a list on the root to rank r."""
        tensor = self._one(outputs, "scatter")
        group = self._of(tensor, "scatter")
        if group is None:
            return self._by_gloo("scatter", outputs, inputs, opts)
        return self._kept(calls.scatter_list(group, is_async(opts), tensor, inputs[0] if inputs else None, opts.rootRank))

    @call
    def barrier(self, opts: Any = None) -> Any:
        """Waits on the host until all ranks have called it, and on GPUs for what this rank has enqueued on the current stream."""
        if self._serves_gpus():
            # Ranks need not have a group yet, and the work of other streams is not that of the barrier.
            if torch.cuda.is_initialized():
                torch.cuda.current_stream().synchronize()
            return self._by_gloo("barrier", *([] if opts is None else [opts]))

        self.group().barrier()
        return All([])

    def _is_for_gloo(self, tensor: Any, op: Any) -> bool:
        """Returns whether Gloo has an operator that Peerlane lacks, for a tensor of the CPU."""
        if tensor.device.type != "cpu":
            return False
        try:
            name = calls.operator_name(op)
        except InvalidArgument:
            return True
        return tensor.dtype == torch.bool and name not in calls.OF_BOOLEANS

    # Several tensors in one call

    def _each(self, method: Callable, tensors: Any, opts: Any) -> Any:
        """Calls a collective for each of several tensors, and returns the work of all."""
        works = [method(*each, opts) for each in tensors]
        return All(works) if is_async(opts) else None

    @call_as("all_reduce_coalesced")
    def allreduce_coalesced(self, tensors: list[Any], opts: Any = _ALL_REDUCE) -> Any:
        """Reduces each tensor of a list in place."""
        return self._each(self.allreduce, [([tensor],) for tensor in tensors], opts)

    @call_as("all_gather_into_tensor_coalesced")
    def allgather_into_tensor_coalesced(self, outputs: list[Any], inputs: list[Any], opts: Any = _OTHER) -> Any:
        """Gathers each tensor of a list."""
        return self._each(self._allgather_base, zip(outputs, inputs), opts)

    @call
    def reduce_scatter_tensor_coalesced(self, outputs: list[Any], inputs: list[Any], opts: Any = _REDUCE_SCATTER) -> Any:
        """Reduces and scatters each tensor of a list."""
        return self._each(self._reduce_scatter_base, zip(outputs, inputs), opts)

    @call_as("all_gather_coalesced")
    def allgather_coalesced(self, outputs: list[list[Any]], inputs: list[Any], opts: Any = _OTHER) -> Any:
        """Gathers each tensor of a list to a list of tensors."""
        lists = [[[output[index] for output in outputs]] for index in range(len(inputs))]
        return self._each(self.allgather, [(output, [tensor]) for output, tensor in zip(lists, inputs)], opts)

    def _start_coalescing(self, device: Any) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any) -> All:
        works, self._coalesced = self._coalesced or [], None
        return All(works)

    # What only Gloo has

    def _pass(self, tensors: list[Any], *arguments: Any, method: str) -> Any:
        for tensor in tensors:
            if tensor.device.type != "cpu":
                raise Unavailable(
                    f"{method} of a tensor on {tensor.device}, which Peerlane does not have; use a process group that has it, "
                    'such as torch.distributed.new_group(backend="nccl")'
                )
        return self._by_gloo(method, tensors, *arguments)

    send = partialmethod(_pass, method="send")
    recv = partialmethod(_pass, method="recv")
    recv_anysource = partialmethod(_pass, method="recv_anysource")

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Waits as `barrier`, by Gloo, and names the ranks that do not come."""
        self._by_gloo("monitored_barrier", timeout or self._timeout, wait_all_ranks)

    # The end

    def shutdown(self) -> None:
        """Closes the group. `torch.distributed.destroy_process_group` calls it on all ranks."""
        group = self._leave()
        if group is None or group.is_closed:
            return

        try:
            group.check()
        except Error:
            # The call that has ended the group has raised its error.
            group.abandon()
            return

        try:
            group.close()
        except Error as error:
            print(f"peerlane: rank {self._rank} cannot close the process group {self._name!r} with the others: {error}", file=sys.stderr)
            group.abandon()

    def abort(self) -> None:
        """Leaves the group at once. The other ranks lose this rank."""
        group = self._leave()
        if group is not None:
            group.abandon()

    def _leave(self) -> Group | None:
        group, self._group, self._gloo, self._is_shut_down = self._group, None, None, True
        return group

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of the group that is opened later."""
        self._timeout = timeout

    _set_timeout = _set_default_timeout = set_timeout


class All(dist.Work):
    """Waits for several calls."""

    def __init__(self, works: list[Any]):
        super().__init__()
        self._works = works

    def wait(self, timeout: Any = None) -> bool:
        """Waits for each call, as `Work.wait`."""
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Returns whether all calls are complete, without waiting."""
        return all(work.is_completed() for work in self._works)

    def result(self) -> list[Any]:
        """Returns the tensors that the calls write."""
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> torch.futures.Future:
        """Returns a future of the outputs of all calls."""
        futures = [work.get_future() for work in self._works]
        return torch.futures.collect_all(futures).then(lambda done: [tensor for each in done.value() for tensor in each.value()])


def is_async(options: Any) -> bool:
    """Returns whether a call returns without waiting. Options of some collectives do not say it in older versions, which wait for what is returned."""
    return getattr(options, "asyncOp", True)


def create(described: Any, options: Any) -> ProcessGroup:
    """Makes a process group, as `torch.distributed.Backend.register_backend` describes."""
    if options is not None and not isinstance(options, dict):
        raise InvalidArgument(f"pg_options is {shown(options)}, expected a dictionary of options of peerlane.open")
    return ProcessGroup(described.store, described.group_rank, described.group_size, described.timeout, options or {})


def register() -> None:
    """Makes the backend known to PyTorch, so that `init_process_group` finds it by its name."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])


@names_call
def group_of(process_group: Any = None, **options: Any) -> Group:
    """Returns the group of the ranks of a `ProcessGroup`; None is the default one. Collective when it is first called.

    `options` are those of `peerlane.open`. By default, ranks use the current GPU if PyTorch has one, and host memory otherwise.
    """
    process_group = known(process_group)
    if isinstance(process_group, ProcessGroup):
        if options and options != process_group.options:
            raise InvalidArgument(
                f"the options are {options}, expected none, or {process_group.options} as the pg_options of this process group of Peerlane"
            )
        return process_group.group()

    group, opened_with, of = _groups.get(process_group.group_name, (None, {}, None))
    if group is not None and of is not process_group:
        group.abandon()  # that of a process group that was destroyed
    elif group is not None and not group.is_closed:
        if options and options != opened_with:
            raise InvalidArgument(
                f"the group of this process group was opened with {opened_with}, expected that or no options, found {options}"
            )
        return group

    given = dict(options)
    if "backend" not in options and "device" not in options and torch.cuda.is_available():
        options |= of_gpu()
    elif "backend" not in options:
        options["backend"] = "host"

    # A name of its own, because a store can serve again after the group was closed.
    name = process_group.group_name
    _openings[name] = _openings.get(name, 0) + 1
    store = dist.PrefixStore(f"peerlane {_openings[name]}", dist.distributed_c10d._get_process_group_store(process_group))
    timeout = timedelta(seconds=float(options.get("start_timeout") or _START_TIMEOUT))
    group = open_through(store, dist.get_rank(process_group), dist.get_world_size(process_group), timeout, options)
    _groups[name] = group, given, process_group
    return group


@names_call
def close(process_group: Any = None) -> None:
    """Closes the group of a `ProcessGroup`. Collective. Call it before `destroy_process_group`.

    A process group of Peerlane closes its group itself, in `destroy_process_group`, so this does nothing then.
    """
    process_group = known(process_group)
    if isinstance(process_group, ProcessGroup):
        return
    group, *_ = _groups.pop(process_group.group_name, (None,))
    if group is not None:
        group.close()


def known(process_group: Any) -> Any:
    """Returns a process group, which is the default one for None."""
    if process_group is None and not dist.is_initialized():
        raise InvalidArgument("PyTorch has no process group; call torch.distributed.init_process_group first, or give a peerlane.Group")
    return process_group or dist.group.WORLD


def resolved(group: Any) -> Any:
    """Returns what an argument stands for: a `ProcessGroup` or a `peerlane.Group`. None is the default process group, or else the default group."""
    if isinstance(group, Group):
        return group
    return default_group() if group is None and not dist.is_initialized() else known(group)


def open_through(store: Any, rank: int, size: int, timeout: timedelta, options: dict) -> Group:
    """Opens a group whose ranks find each other through a store of PyTorch."""

    def value(key: str, owner: int) -> str:
        try:
            return store.get(key).decode()
        except dist.DistStoreError as error:
            seconds = timeout.total_seconds()
            late = Timeout(f"rank {owner} has not come to open the group within {seconds} s: {error}")
            late.rank = owner
            raise late from None

    store.set_timeout(timeout)
    store.set(f"host {rank}", host())
    hub = None
    if rank == 0:
        hosts = {value(f"host {each}", each) for each in range(size)}
        try:
            secret = secrets.token_hex(16)
            hub = _native.Hub(f"{'127.0.0.1' if len(hosts) == 1 else own_address()}:0", size, secret)
            told = {"address": hub.address, "secret": secret}
        except (Error, OSError, ValueError) as error:
            told = {"error": str(error)}
        store.set("hub", json.dumps(told))

    told = json.loads(value("hub", 0))
    if "error" in told:
        raise Unavailable(f"rank 0 cannot open the hub through which ranks find each other: {told['error']}")
    return open_group(hub=hub or told["address"], rank=rank, ranks=size, secret=told["secret"], **options)


def of_gpu(device: int | None = None) -> dict:
    """Returns the options of a group on a GPU, by default the current one."""
    return {"backend": "rocm" if torch.version.hip else "cuda", "device": torch.cuda.current_device() if device is None else device}


def host() -> str:
    """Returns what differs between hosts."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot}"


def own_address() -> str:
    """Returns the address at which other hosts reach this one: that of the route to the launcher's host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", "192.0.2.1"), int(os.environ.get("MASTER_PORT", "29500"))))
        address = probe.getsockname()[0]
        if address.startswith("127."):  # the name of this host, as other hosts do not resolve it
            probe.connect(("192.0.2.1", 9))
            address = probe.getsockname()[0]
        return address

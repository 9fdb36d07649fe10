"""Collectives on copy engines and network adapters, which leave the compute units to compute.

    import numpy, peerlane

    with peerlane.init(backend="host") as group:         # ranks of torchrun, mpirun or srun
        mine = numpy.full(4, group.rank, "float32")
        all = group.empty((group.size, 4), "float32")    # at equal places on all ranks: no copy
        group.all_gather(mine, all)

`Group` has the collectives; `peerlane.torch` has them with the signatures of `torch.distributed`, and `peerlane.fsdp` gives FSDP2 an all-gather.
Errors are `peerlane.Error`, with `kind` and `rank`. Every wait has a deadline: the `timeout` of `init`.
"""

from __future__ import annotations

import atexit

from peerlane import _native
from peerlane._errors import Aborted, Error, InvalidArgument, Mismatch, OutOfMemory, PeerLost, Timeout, Unavailable, names_call
from peerlane._group import Future, Group, Operation, Window, end_process
from peerlane._native import Hub, Memory
from peerlane._spawn import spawn

__version__ = _native.VERSION
__all__ = [
    "Aborted", "Error", "Future", "Group", "Hub", "InvalidArgument", "Memory", "Mismatch", "Operation", "OutOfMemory", "PeerLost",
    "Timeout", "Unavailable", "Window", "group", "init", "open", "spawn",
]  # fmt: skip

_default: Group | None = None

atexit.register(end_process)


@names_call
def open(*, hub: str | Hub | None = None, rank: int = 0, ranks: int | None = None, secret: str | None = None, backend: str | None = None,
         network: str | None = None, device: int | None = None, timeout: float | None = None, start_timeout: float | None = None,
         strict: bool = False, beside_compute: bool = False, engine: str | None = None, label: str | None = None) -> Group:  # fmt: skip
    """Opens a group. Collective: all ranks call it.

    Without `hub`, rank, size and address come from the environment of the launcher (torchrun, mpirun, srun); without a launcher the group has one rank, and
    `Group.selection` says so. `ranks` is then the number that the group must have: another one is `InvalidArgument`, at once and with the variable that gives it.
    `hub` is the address of a `Hub`, such as "10.0.0.1:29501", with `rank`, `ranks` (1) and, between hosts, the hub's `secret`; rank 0 can give the `Hub` itself,
    which then lives as long as the group. `backend` and `network` are "host", "cuda", "rocm", "rdma" or "ucx"; by default the best ones. `device` is the number of the GPU. `timeout` is
    the longest wait for a rank in seconds (30), also of calls such as `prepare`, `start_timeout` that for the start of all ranks (120). `strict` makes fallbacks errors.
    With `beside_compute`, operations run beside kernels of the program and take few compute units, unless a call says otherwise; all ranks set the same.
    `engine` is the kind of engines that operations use, such as "streams"; by default each uses the fastest of `Group.engines`.
    `label` names the group in the errors of this rank.

    Raises `Timeout` or `PeerLost` with the rank that is missing, `Mismatch`, `InvalidArgument`, `Unavailable` with what to install.
    """
    native = _native.Group.open(
        hub=hub, rank=rank, ranks=ranks, secret=secret, backend=backend, network=network, device=device, timeout=timeout,
        start_timeout=start_timeout, strict=strict, beside_compute=beside_compute, engine=engine, label=label,
    )  # fmt: skip
    return Group(native)


@names_call
def init(**options) -> Group:
    """Opens the default group of this process, with the options of `open`. Collective.

    Raises `InvalidArgument` if the default group is open.
    """
    global _default
    if _default is not None and not _default.is_closed:
        raise InvalidArgument(
            "init was called before; use peerlane.group(), close that group first, or open another one with peerlane.open"
        )
    _default = open(**options)
    return _default


@names_call
def group() -> Group:
    """Returns the group that `init` has opened."""
    if _default is None or _default.is_closed:
        raise InvalidArgument("there is no group; call peerlane.init() first")
    return _default

"""Types of the native module; `peerlane` documents what users call."""

from typing import Any

VERSION: str

Lens = int | list[int] | tuple[list[int], list[int]]

class Memory:
    """A range of memory of elements of one type, which keeps its owner alive.

    It supports DLPack, the buffer protocol (host memory only) and `__cuda_array_interface__`.
    """

    def __init__(self, address: int, nbytes: int, dtype: str, device: tuple[int, int], owner: Any) -> None: ...
    @property
    def address(self) -> int:
        """The address of the first byte, on the host or on the device."""
    @property
    def nbytes(self) -> int:
        """The size in bytes."""
    @property
    def device(self) -> tuple[int, int]:
        """The device as in DLPack: kind and number."""
    @property
    def dtype(self) -> str:
        """The name of the element type, such as "f32"."""
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __dlpack__(
        self, *, stream: Any = None, max_version: tuple[int, int] | None = None, dl_device: Any = None, copy: bool | None = None
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...

class Goal:
    """States what a collective takes from one rank and gives to it."""

    def __init__(self, collective: str, root: int, rank: int, ranks: int) -> None: ...
    @staticmethod
    def names() -> list[str]:
        """The names of all collectives."""
    @property
    def has_input(self) -> bool: ...
    @property
    def has_output(self) -> bool: ...
    @property
    def is_for_all_ranks(self) -> bool:
        """Whether every rank has an input and an output."""
    @property
    def takes_all(self) -> bool:
        """Whether the input has a block for every rank."""
    @property
    def gives_all(self) -> bool:
        """Whether the output has a block of every rank."""
    @property
    def is_reduction(self) -> bool: ...
    @property
    def lengths_may_differ(self) -> bool: ...

class Hub:
    """Serves the messages through which ranks find each other and agree, on threads of the process that makes it.

    `address` is one such as "127.0.0.1:0"; `secret` has at least 16 characters, and is needed for an address that other hosts reach. A hub serves
    one group. It must live as long as the group: rank 0 gives it to `peerlane.open`, or the launcher keeps it.
    """

    def __init__(self, address: str, ranks: int, secret: str | None = None) -> None: ...
    @property
    def address(self) -> str:
        """The address at which ranks join."""
    def close(self) -> None:
        """Closes the hub. The group that was opened through it ends."""

class Window:
    """Memory of the same size on every rank."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def memory(self, begin: int = 0, nbytes: int | None = None, dtype: str = "u8") -> Memory: ...

class Operation:
    """A prepared collective operation."""

    @property
    def input(self) -> Memory: ...
    @property
    def output(self) -> Memory: ...
    def run(self, timeout: float | None = None) -> None: ...
    def start(self) -> None: ...
    def wait(self, timeout: float | None = None) -> None: ...
    def is_done(self) -> bool: ...
    def start_on(self, stream: int) -> Memory: ...
    def start_beside(self, stream: int) -> Memory: ...
    def wait_block_on(self, stream: int, block: int, chunk: int | None = None) -> None: ...
    def depart(self, block: int, chunk: int | None = None, stream: int | None = None) -> None: ...
    def finish(self) -> None: ...
    def wait_block(self, block: int, chunk: int | None = None, timeout: float | None = None) -> None: ...
    def block(self, block: int) -> Memory: ...
    @property
    def arrivals(self) -> list[tuple[int, int]]: ...
    @property
    def departures(self) -> list[tuple[int, int]]: ...
    def resize(self, lens: Lens, input: int | None = None, output: int | None = None) -> None: ...
    def check(self) -> None: ...
    def report(self) -> str: ...
    def drop(self) -> None: ...

class Exchange:
    """An exchange of bytes between all ranks in progress."""

    def wait(self) -> list[bytes]: ...

class Group:
    """A group of ranks."""

    @staticmethod
    def open(
        *,
        hub: str | Hub | None = None,
        rank: int = 0,
        ranks: int | None = None,
        secret: str | None = None,
        backend: str | None = None,
        network: str | None = None,
        device: int | None = None,
        timeout: float | None = None,
        start_timeout: float | None = None,
        strict: bool = False,
        beside_compute: bool = False,
        engine: str | None = None,
        label: str | None = None,
    ) -> Group: ...
    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    @property
    def backend(self) -> str: ...
    @property
    def device(self) -> int | None: ...
    @property
    def selection(self) -> str: ...
    @property
    def engines(self) -> list[str]:
        """The kinds of engines that all ranks offer, the preferred one first."""
    @property
    def beside_compute(self) -> bool:
        """Whether operations run beside kernels of the caller, unless they say otherwise."""
    @property
    def memory_device(self) -> tuple[int, int]: ...
    def barrier(self) -> None: ...
    def stats(self) -> str: ...
    def trim(self) -> int: ...
    def refuse(self, text: str) -> None: ...
    def note_refusal(self, text: str) -> None: ...
    def exchange(self, data: bytes) -> list[bytes]: ...
    def begin_exchange(self, data: bytes) -> Exchange: ...
    def check(self) -> None: ...
    def split(self, color: int | None, key: int, label: str | None = None) -> Group | None: ...
    def subgroup(self, ranks: list[int]) -> Group: ...
    def shrink(self) -> Group: ...
    def close(self) -> None: ...
    def abandon(self) -> None: ...
    def allocate_window(self, nbytes: int, on_demand: bool = False) -> Window: ...
    def window_over(self, address: int, nbytes: int) -> Window: ...
    def window_over_descriptor(self, descriptor: int, nbytes: int, offset: int) -> Window: ...
    def release(self, window: Window) -> None: ...
    def prepare(
        self,
        collective: str,
        dtype: str,
        lens: Lens,
        *,
        root: int = 0,
        reduction: str = "sum",
        algorithm: str | None = None,
        chunks: int | None = None,
        in_place: bool = False,
        capturable: bool = False,
        resizable: bool = False,
        check_starts: bool = False,
        arrivals: bool = False,
        departures: bool = False,
        strict: bool = False,
        beside_compute: bool | None = None,
        engine: str | None = None,
        timeout: float | None = None,
        input: tuple[Window, int] | None = None,
        output: tuple[Window, int] | None = None,
        matrix: tuple[int, str] | None = None,
        label: str | None = None,
    ) -> Operation: ...

class Borrowed:
    """A tensor of another library, which is given back when this object is dropped."""

def buffer(array: Any) -> tuple[int, int, bool]:
    """Returns address, bytes and whether it is read-only of an object with the buffer protocol."""

def element_types() -> list[tuple[str, str, str, int, bool]]:
    """Returns all element types: the name, the name in PyTorch, that in NumPy, and the bytes of an element.

    For a type that NumPy lacks, its name is that of unsigned integers.
    """

def from_dlpack(name: str, array: Any) -> tuple[int, int, str, tuple[int, int], tuple[bool, bool] | None, Borrowed]:
    """Returns address, bytes, name of the type and device of an array with `__dlpack__`, and the owner of the memory.

    Before the owner are the flags read-only and copied, or None if its library knows only DLPack from before version 1.0.
    """

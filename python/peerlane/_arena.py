"""Memory at equal places on all ranks, out of which arrays and tensors are cut."""

from __future__ import annotations

import threading
from array import array

from peerlane import _native
from peerlane._errors import Error, OutOfMemory, of_native

_ALIGNMENT = 512
# Memory is taken from the system in multiples of this size.
_STEP_BYTES = 2 << 20
# The part of the memory so far by which it grows at least, so that many small arrays need few windows, and the most that it is.
_GROWTH_PART = 4
_GROWTH_BYTES_MAX = 64 << 20


class Block:
    """A range of a window, which is freed when its last user is gone."""

    __slots__ = ("arena", "begin", "nbytes", "number", "window")

    def __init__(self, arena: Arena, number: int, window: _native.Window, begin: int, nbytes: int):
        self.arena, self.number, self.window, self.begin, self.nbytes = arena, number, window, begin, nbytes

    def memory(self, dtype: str) -> _native.Memory:
        """Returns the memory as elements of a type."""
        return _native.Memory(self.window.address + self.begin, self.nbytes, dtype, self.arena.device, self)

    def __del__(self):
        self.arena.freed.append(self.number)


class Arena:
    """Allocates blocks at places that are equal on all ranks, without a message for most of them.

    All ranks allocate the same sizes in the same order. They free at different times, so a block that is free here is used again only when the ranks have
    told each other that it is free on all of them. They begin to do so when another block of the last size would not fit, and wait for each other when a block does not.

    Memory grows by what a block needs, in steps of 2 MiB. On the host, a page is taken from the system when it is first used.
    """

    def __init__(self, group: _native.Group):
        self.group = group
        self.device = group.memory_device
        self.windows: list[_native.Window] = []
        # The free ranges of each window as (begin, end), sorted.
        self.free: list[list[tuple[int, int]]] = []
        # The blocks in use: window number, begin, end and bytes by block number.
        self.blocks: dict[int, tuple[int, int, int, int]] = {}
        self.count = 0
        # The numbers of blocks that this rank has freed since the last exchange.
        self.freed: list[int] = []
        # The ranks that have freed a block which others still hold, as far as they have told.
        self.freed_by: dict[int, set[int]] = {}
        self.exchange: _native.Exchange | None = None
        self.exchanges = 0
        self.lock = threading.RLock()

    def allocate(self, nbytes: int) -> Block:
        """Allocates a block. Collective: every rank allocates the same sizes in the same order."""
        with self.lock:
            self.group.check()
            taken = max(nbytes, 1) + -max(nbytes, 1) % _ALIGNMENT
            found = self._take(taken)
            if found is None and self.exchange is not None:
                self.settled()
                found = self._take(taken)
            if found is None and self.blocks:
                self._begin_exchange()
                self.settled()
                found = self._take(taken)
            if found is None:
                self._grow(nbytes, taken)
                found = self._take(taken)
            index, begin = found
            number, self.count = self.count, self.count + 1
            self.blocks[number] = (index, begin, begin + taken, nbytes)
            window = self.windows[index]
            # An array that is a whole block is used there. A part of a block can be another part on another rank.
            self.group.add_place(window.address + begin, nbytes, window, begin)
            # The only block in use is this one, which no rank has freed.
            is_alone = len(self.blocks) == 1
            if self.exchange is None and not is_alone and not any(end - begin >= taken for ranges in self.free for begin, end in ranges):
                self._begin_exchange()
            return Block(self, number, window, begin, nbytes)

    def reserve(self, nbytes: int, on_demand: bool = False) -> None:
        """Opens one more window. Collective."""
        window = self.settled().allocate_window(nbytes + -nbytes % _ALIGNMENT, on_demand)
        self.windows.append(window)
        self.free.append([(0, window.nbytes)])

    def _grow(self, nbytes: int, taken: int) -> None:
        """Opens a window that has room for a block of `nbytes` bytes, which takes `taken` bytes."""
        least = min(self.bytes() // _GROWTH_PART, _GROWTH_BYTES_MAX)
        window_bytes = max(taken, least)
        try:
            self.reserve(window_bytes + -window_bytes % _STEP_BYTES, on_demand=True)
        except Error as error:
            # Another rank's error has the kind "aborted" here, but all ranks lack the memory.
            if error.kind != "out of memory" and "(out of memory)" not in str(error):
                raise
            text = f"empty cannot allocate {nbytes} bytes: {error}; {self._holdings()}"
            full = OutOfMemory(text)
            full.rank = error.rank
            raise full from error

    def _holdings(self) -> str:
        """Returns which rank holds how much of the memory, after the exchange that precedes growth."""
        held = []
        for rank in range(self.group.ranks):
            blocks = [(end - begin) for number, (_, begin, end, _) in self.blocks.items() if rank not in self.freed_by.get(number, ())]
            held.append(f"rank {rank} holds {len(blocks)} arrays of {sum(blocks)} bytes")
        return f"of {self.bytes()} bytes in use or free, {', '.join(held)}"

    def bytes(self) -> int:
        """Returns the bytes of all windows."""
        return sum(window.nbytes for window in self.windows)

    def settled(self) -> _native.Group:
        """Returns the group for a call that all ranks make together, after the exchange in progress, whose blocks become free."""
        with self.lock:
            if self.exchange is not None:
                try:
                    freed_by_ranks = self.exchange.wait()
                except Error:
                    self.exchange = None
                    raise
                # Not after Ctrl-C: the next call waits again.
                self.exchange = None
                for rank, theirs in enumerate(freed_by_ranks):
                    if len(theirs) % array("Q").itemsize:
                        text = f"rank {rank} makes another call than empty; make the same calls in the same order on all ranks"
                        raise of_native("mismatch", text, rank)
                    for number in array("Q", theirs):
                        self.freed_by.setdefault(number, set()).add(rank)
                for number in sorted(n for n, ranks in self.freed_by.items() if len(ranks) == self.group.ranks):
                    del self.freed_by[number]
                    index, begin, end, nbytes = self.blocks.pop(number)
                    self.group.remove_place(self.windows[index].address + begin, nbytes)
                    self.free[index] = _joined(sorted([*self.free[index], (begin, end)]))
            return self.group

    def report(self) -> dict:
        """Returns the bytes of the arena and how often ranks told each other what they have freed."""
        in_use = sum(end - begin for _, begin, end, _ in self.blocks.values())
        return {"bytes": self.bytes(), "bytes_in_use": in_use, "exchanges": self.exchanges}

    def _take(self, nbytes: int) -> tuple[int, int] | None:
        for index, ranges in enumerate(self.free):
            for at, (begin, end) in enumerate(ranges):
                if end - begin >= nbytes:
                    ranges[at : at + 1] = [(begin + nbytes, end)] if end - begin > nbytes else []
                    return index, begin
        return None

    def _begin_exchange(self) -> None:
        self.exchanges += 1
        count = len(self.freed)
        mine, self.freed[:count] = array("Q", self.freed[:count]), []
        self.exchange = self.group.begin_exchange(mine.tobytes())


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for begin, end in ranges:
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return joined

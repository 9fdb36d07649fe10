"""Memory for the outputs of collectives that a program makes again and again, in which ranks need no messages to use a block again."""

from __future__ import annotations

import gc
import math
import struct
import threading

from peerlane._arena import Arena
from peerlane._arguments import WHOLE_MAX
from peerlane._arrays import CPU
from peerlane._errors import Error, OutOfMemory, of_native
from peerlane._group import Group
from peerlane._torch import torch

# Ranks tell each other how long they hold blocks until that has not grown for so many allocations.
_LEARNING = 64
_MESSAGE = struct.Struct("<4sQQQ")
_NAME = b"pool"
# The part of the memory of a device that a pool takes at most, unless the caller says more.
_DEVICE_PART = 4
# The most by which a block is longer than a tensor.
_EXCESS_MAX = 1.25
# The number of references to the memory of a storage.
_use_count = torch._C._storage_Use_Count


def default_limit(group: Group) -> int:
    """Returns the most bytes that a pool takes, if the caller says nothing else."""
    place = group._native.memory_device
    return WHOLE_MAX if place == CPU else torch.cuda.get_device_properties(place[1]).total_memory // _DEVICE_PART


class _Block:
    """A range of the memory of the group, out of which tensors are cut."""

    __slots__ = ("address", "arena", "begin", "last", "nbytes", "resting_count", "storage", "tensor", "views", "window")

    def __init__(self, arena: Arena, nbytes: int):
        # The whole tensor of each size and type, whose aliases are given away.
        self.views: dict[tuple, torch.Tensor] = {}
        self.arena, self.nbytes = arena, nbytes
        block = arena.allocate(nbytes)
        self.window, self.begin = block.window, block.begin
        self.tensor = torch.from_dlpack(block.memory("u8").__dlpack__())
        self.storage = self.tensor.untyped_storage()
        # The address of the storage object, by which PyTorch counts its references.
        self.address = self.storage._cdata
        # The number of the allocation that it has served last.
        self.last = 0
        self.resting_count = _use_count(self.address)

    def is_held(self) -> bool:
        """Returns whether the program holds a tensor in the memory, also as a view."""
        return _use_count(self.address) > self.resting_count

    def view(self, size: tuple, dtype: torch.dtype, nbytes: int) -> torch.Tensor:
        """Returns the tensor of a size and type at the beginning of the memory, which the pool keeps."""
        view = self.views.get((size, dtype))
        if view is None:
            before = _use_count(self.address)
            with torch.inference_mode(False), torch.no_grad():
                view = self.views[size, dtype] = self.tensor[:nbytes].view(dtype).view(size)
            self.resting_count += _use_count(self.address) - before
            # All ranks cut it here, so calls can use it like a whole array.
            if nbytes != self.nbytes:
                self.arena.group.add_place(self.window.address + self.begin, nbytes, self.window, self.begin)
        return view

    def __del__(self):
        # The arena will cut other arrays out of the memory.
        for nbytes in {view.nbytes for view in self.views.values()} - {self.nbytes}:
            self.arena.group.remove_place(self.window.address + self.begin, nbytes)


class Pool:
    """Allocates tensors at equal places on all ranks, without a message once it knows how long the program holds them.

    All ranks allocate the same sizes in the same order, and drop tensors at about the same calls. So the pool takes a block as free on all ranks if `distance`
    allocations have followed the one that it served, and checks that it is free on this rank. In the first allocations, ranks tell each other for how many
    allocations they hold tensors; the distance is the largest number, and one more. If a program later holds them for longer, on all ranks, they do so again.

    Whether peers may write into a block is no question of the pool: the start of a collective says so in the order of its stream.
    """

    def __init__(self, group: Group, limit: int):
        # The ranks take the smallest limit.
        self.group, self.limit = group, limit
        self.blocks: list[_Block] = []
        # The blocks for each size and type, with their tensors.
        self.fitting: dict[tuple, list[tuple[_Block, torch.Tensor]]] = {}
        # The distance, the allocations so far, and the one at which the distance has grown last.
        self.distance, self.count, self.grown_at = 1, 0, 0
        self.is_learning, self.is_full = True, False
        self.messages = 0
        # Finalizers that a collection runs may come back.
        self.lock = threading.RLock()

    def allocate(self, size: tuple, dtype: torch.dtype) -> torch.Tensor | None:
        """Returns a tensor, or None on all ranks if the memory of the pool is exhausted. Collective: every rank allocates alike."""
        # Most allocations take the first way out, which calls as few functions as possible.
        with self.lock:
            self.count += 1
            if self.is_learning:
                self._agree()

            while True:
                newest = self.count - self.distance
                for block, view in self.fitting.get((size, dtype)) or self._fitting(size, dtype):
                    if block.last > newest:
                        continue
                    if block.is_held():
                        # The next round takes another block, or this one if only a circle of references held it.
                        self._let_go(block)
                        break
                    block.last = self.count
                    # Each alias adds a reference until it is dropped.
                    return view.detach()
                else:
                    if not self._takes_block(math.prod(size) * dtype.itemsize):
                        return None

    def report(self) -> dict:
        """Returns what the pool has taken, and how it uses it."""
        return {
            "bytes": sum(block.nbytes for block in self.blocks),
            "blocks": len(self.blocks),
            "limit": self.limit,
            "distance": self.distance,
            "is_learning": self.is_learning,
            "messages": self.messages,
        }

    def _fitting(self, size: tuple, dtype: torch.dtype) -> list[tuple[_Block, torch.Tensor]]:
        """Returns the blocks for a tensor in the order in which they were taken, without those that are much too long."""
        nbytes = math.prod(size) * dtype.itemsize
        blocks = [block for block in self.blocks if nbytes <= block.nbytes <= _EXCESS_MAX * nbytes]
        fitting = [(block, block.view(tuple(size), dtype, nbytes)) for block in blocks]
        self.fitting[size, dtype] = fitting
        return fitting

    def _takes_block(self, nbytes: int) -> bool:
        """Takes one more block, and returns whether there is memory for it."""
        taken = sum(block.nbytes for block in self.blocks)
        self.is_full = self.is_full or taken + nbytes > self.limit
        if self.is_full:
            return False
        try:
            with torch.inference_mode(False):
                self.blocks.append(_Block(self.group._calls.arena, nbytes))
        except OutOfMemory:
            # On all ranks; they do not try again.
            self.is_full = True
            return False
        self.fitting.clear()
        return True

    def _agree(self) -> None:
        """Learns from all ranks for how many allocations they hold tensors. Collective."""
        ages = (self.count - block.last for block in self.blocks if block.is_held())
        mine = _MESSAGE.pack(_NAME, self.count, self.limit, 1 + max(ages, default=0))
        self.messages += 1

        distance = self.distance
        for rank, theirs in enumerate(self.group.exchange(mine)):
            if len(theirs) != _MESSAGE.size or not theirs.startswith(_NAME):
                raise of_native(
                    "mismatch", f"rank {rank} makes another call than allocate; make the same calls in the same order on all ranks", rank
                )
            _, count, limit, needed = _MESSAGE.unpack(theirs)
            if count != self.count:
                text = f"rank {rank} makes allocation {count} where rank {self.group.rank} makes allocation {self.count}; allocate alike on all ranks"
                raise of_native("mismatch", text, rank)
            self.limit, distance = min(self.limit, limit), max(distance, needed)

        if distance > self.distance:
            self.distance, self.grown_at = distance, self.count
        elif self.is_learning and self.count - self.grown_at >= _LEARNING:
            self.is_learning = False
            # One more, for a rank that drops a tensor a little later than it ever has.
            self.distance += 1

    def _let_go(self, block: _Block) -> None:
        """Collects what holds a block, or learns a larger distance if the program of all ranks holds tensors for longer."""
        gc.collect()
        if not block.is_held():
            return

        try:
            self._agree()
        except Error as error:
            text = (
                f"{error}; this rank holds a tensor of allocation {block.last} in allocation {self.count}, expected at most {self.distance - 1} allocations "
                "later, as before; drop it earlier, or hold it for as long on all ranks"
            )
            raise of_native(error.kind, text, error.rank) from error

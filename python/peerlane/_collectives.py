"""Collectives on arrays of the caller: prepared operations that are kept, and copies where memory is not Peerlane's."""

from __future__ import annotations

import ctypes
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from peerlane import _native
from peerlane._arena import Arena
from peerlane._arguments import flag, limit, shown, whole, wholes
from peerlane._arrays import CPU, ITEMSIZE, View, view
from peerlane._errors import Error, InvalidArgument, of_native
from peerlane._group import Future

_OPERATIONS_MAX = 64
_SIZES_MAX = 4096

Place = tuple[_native.Window, int]
Copy = tuple[int, int, int]


class Collectives:
    """Executes collectives on arrays for one group."""

    def __init__(self, group: _native.Group):
        self.group = group
        self.arena = Arena(group)
        self.operations: OrderedDict[tuple, _native.Operation] = OrderedDict()
        # Those that graphs have recorded, which stay, because a graph may be replayed at any time.
        self.captured: dict[tuple, _native.Operation] = {}
        self.hits = self.misses = self.copied = self.calls = 0
        # Memory for arrays that are not in a window: inputs first, then outputs.
        self.scratch: _native.Window | None = None
        # The same for starts that graphs record. The last one is in use; the others belong to earlier graphs.
        self.captured_scratch: list[_native.Window] = []
        self.open: Future | None = None
        self.is_cpu = group.memory_device == CPU
        self.streams: Any = None
        # The host compares the sizes of starts while it waits. Of starts on a stream, sizes are compared when they are first used.
        self.compares_sizes = not self.is_cpu
        self.goals: dict[tuple[str, int], _native.Goal] = {}
        self.sizes: OrderedDict[tuple, None] = OrderedDict()

    def call(self, collective: str, input: Any, output: Any, *, counts: Sequence[int] | None = None,
             splits: tuple[Sequence[int], Sequence[int]] | None = None, root: int = 0, reduction: str = "sum", stream: Any = None,
             wait: bool = True, timeout: float | None = None, beside_compute: bool | None = None) -> Any:  # fmt: skip
        """Starts a collective, and waits for it if `wait` is set."""
        try:
            if timeout is not None:
                timeout = limit("timeout", timeout)
            if stream is not None and self.is_cpu:
                raise InvalidArgument("stream is given, expected none: the memory of the group is that of the host")
            if type(root) is not int:
                root = whole("root", root)
            if not 0 <= root < self.group.ranks:
                raise InvalidArgument(f"root is {shown(root)}, expected a rank below {self.group.ranks}")
            flag("wait", wait)
            is_beside = self.group.beside_compute if beside_compute is None else flag("beside_compute", beside_compute)
            if not isinstance(reduction, str):
                raise InvalidArgument(f"reduction is {shown(reduction)}, expected a string")
            source, target = self._views(collective, input, output, root)
            count = self._count(collective, root, source, target, counts, splits)
        except Error as error:
            self.tell_refusal(error, collective, splits is not None)
            raise
        if self.is_cpu:
            future = self._start(collective, source, target, count, root, reduction, is_beside, output)
            return future.wait(timeout) if wait else future
        if self.streams is None:
            from peerlane._gpu import Streams

            self.streams = Streams(self)
        future = self.streams.start(collective, source, target, count, root, reduction, is_beside, stream, wait)
        if future is None:
            return output
        future._output = output
        return future

    @contextmanager
    def checks(self, collective: str | None = None, has_splits: bool = False) -> Iterator[None]:
        """Checks the arguments of a call that all ranks make together, in the block. The other ranks learn of a refusal.

        `collective` is that of a call on arrays, and None for calls in which ranks always exchange messages.
        """
        try:
            yield
        except Error as error:
            self.tell_refusal(error, collective, has_splits)
            raise

    def tell_refusal(self, error: Error, collective: str | None = None, has_splits: bool = False) -> None:
        """Tells the other ranks that this rank refuses the arguments of the call that they make.

        In a call on arrays, ranks exchange messages when they prepare an operation. If one of this collective is kept, the others may only start it: they
        then wait for this rank, and learn of the refusal when they ask it what it waits for.
        """
        kept = (*self.operations, *self.captured)
        if collective is not None and not has_splits and any(key[0] == collective for key in kept):
            self.group.note_refusal(str(error))
            return
        with suppress(Error):  # a group that has ended says so in the next call
            self.arena.settled().refuse(str(error))

    def finish(self) -> None:
        """Waits for the last start, which the next one of the host must follow."""
        if self.open is not None:
            self.open.wait()
            self.open = None

    def clear(self) -> None:
        """Drops the operations and the memory for copies."""
        self._await_copies()
        if self.streams is not None:
            self.streams.release()
        self.operations.clear()
        self.captured.clear()
        self.captured_scratch.clear()
        self.scratch = None

    def report(self) -> dict:
        """Returns the counts of calls and the memory."""
        prepared = {"kept": len(self.operations) + len(self.captured), "hits": self.hits, "misses": self.misses}
        memory = {**self.arena.report(), "bytes_for_copies": self.scratch.nbytes if self.scratch else 0}
        return {"calls": self.calls, "calls_with_copies": self.copied, "operations": prepared, "memory": memory}

    def goal(self, collective: str, root: int) -> _native.Goal:
        """Returns what a collective takes from this rank and gives to it."""
        found = self.goals.get((collective, root))
        if found is None:
            found = self.goals[collective, root] = _native.Goal(collective, root, self.group.rank, self.group.ranks)
        return found

    # Arguments

    def _views(self, collective: str, input: Any, output: Any, root: int) -> tuple[View | None, View | None]:
        rank, goal = self.group.rank, self.goal(collective, root)
        # A broadcast has one array, the input of the root and the output of the others.
        needs_input = goal.has_input or collective == "broadcast"
        needs_output = goal.has_output
        names = ("array", "array") if input is output else ("input", "output")
        source = self._view(names[0], input) if needs_input else None
        if not needs_output:
            target = None
        else:
            target = source if source is not None and input is output else self._view(names[1], output)
        writes = collective != "broadcast" or rank != root
        if target is not None and target.unwritable is not None and writes:
            raise InvalidArgument(f"{names[1]} {target.unwritable}, expected an array that can be written")
        if source is not None and target is not None and source.type is not target.type and source.type != target.type:
            raise InvalidArgument(f"output has elements of {target.type.name}, expected {source.type.name} as in the input")
        if goal.is_reduction and not source.type.is_reduced:
            raise InvalidArgument(
                f"input has elements of {source.type.name}, which can be moved but not reduced; expected an integer, f16, bf16, f32 or f64"
            )
        return source, target

    def _view(self, name: str, array: Any) -> View:
        seen = view(name, array)
        expected = tuple(self.group.memory_device)
        if seen.device != expected:
            text = f"{name} is on {_device(seen.device)}, expected {_device(expected)}, the device of this rank's group"
            raise InvalidArgument(text)
        return seen

    def _count(self, collective: str, root: int, source: View | None, target: View | None, counts: Any, splits: Any) -> Any:
        """Returns the lengths of blocks in elements of the operation, after the sizes of the arrays were compared with them."""
        lens = self._lens(collective, root, source, target, counts, splits)
        unit = (source or target).type.unit
        if unit == 1:
            return lens
        if isinstance(lens, tuple):
            return tuple([unit * length for length in side] for side in lens)
        return [unit * length for length in lens] if isinstance(lens, list) else unit * lens

    def _lens(self, collective: str, root: int, source: View | None, target: View | None, counts: Any, splits: Any) -> Any:
        """Returns the lengths of blocks in elements of the arrays: one, one for each rank, or a pair of lists."""
        ranks, rank, goal = self.group.ranks, self.group.rank, self.goal(collective, root)
        if splits is not None:
            if collective != "all-to-all":
                raise InvalidArgument(f"splits are given, expected none: only all-to-all has them, and this is {collective}")
            return self._splits(splits, source, target)
        if counts is not None:
            if not goal.lengths_may_differ:
                raise InvalidArgument(f"counts are given, expected none: blocks of a {collective} have one size")
            counts = wholes("counts", counts, ranks)
            blocks, total = counts[rank], sum(counts)
        elif not goal.takes_all and not goal.gives_all:
            blocks = total = counts = (source or target).count
        else:
            small, large = (target, source) if goal.takes_all else (source, target)
            if goal.takes_all and goal.gives_all:
                if source.count % ranks:
                    raise InvalidArgument(f"input has {source.count} elements, expected a multiple of {ranks}, the number of ranks")
                counts, blocks, total = source.count // ranks, source.count, source.count
            else:
                counts = (small or large).count if small else large.count // ranks
                blocks, total = counts, ranks * counts
        expected = (total, blocks) if goal.takes_all else (blocks, total)
        for name, seen, expect in (("input", source, expected[0]), ("output", target, expected[1])):
            if seen is not None and seen.count != expect:
                raise InvalidArgument(f"{name} has {seen.count} elements, expected {expect} for {ranks} ranks")
        return counts

    def _splits(self, splits: Any, source: View, target: View) -> tuple[list[int], list[int]]:
        if not isinstance(splits, (tuple, list)) or len(splits) != 2:
            raise InvalidArgument(
                f"splits is {shown(splits)}, expected a pair of lists: what this rank sends to and receives from each rank"
            )
        ranks, sides = self.group.ranks, []
        for name, lens, seen in (("send", splits[0], source), ("receive", splits[1], target)):
            # Each number before the sum, to which negative numbers can fit.
            side = wholes(f"splits, {name}", lens)
            if len(side) != ranks or sum(side) != seen.count:
                text = f"splits, {name}: {shown(side)} for {seen.count} elements, expected {ranks} numbers with that sum"
                raise InvalidArgument(text)
            sides.append(side)
        return sides[0], sides[1]

    # Starts

    def place(self, seen: View | None) -> Place | None:
        """Returns the window and the byte at which an array begins, or None if it is in no window."""
        return None if seen is None else self.arena.find(seen.address, seen.nbytes)

    def plan(self, collective: str, source: View | None, target: View | None, count: Any, root: int, is_captured: bool = False) -> Start:
        """Chooses the places of input and output, and which of them are copied. Equal on all ranks."""
        self.calls += 1
        dtype = (source or target).type.dtype
        size, ranks, rank = ITEMSIZE[dtype], self.group.ranks, self.group.rank
        goal = self.goal(collective, root)
        start = Start(collective, dtype, count, source, target, is_captured)
        if isinstance(count, tuple):
            # The other ranks do not know the sizes of this one, so the blocks are in rows that are long enough for all.
            longest = self._longest(count)
            scratch = self._use_scratch(start, ranks * longest * size, ranks * longest * size, True, True)
            start.pitch = scratch.nbytes // (2 * ranks * size)
            start.input, start.output = (scratch, ranks * start.pitch * size), (scratch, 0)
            return start
        each = count if isinstance(count, list) else [count] * ranks
        total = sum(each) * size
        start.input, start.output = self.place(source), self.place(target)
        if collective == "broadcast":
            start.is_in_place, start.input = True, None
            if start.output is None:
                self._use_scratch(start, 0, count * size, False, True)
                start.copies_input, start.copies_output = rank == root, rank != root
            return start
        if goal.is_reduction and goal.is_for_all_ranks and not goal.takes_all:
            # Out of place, because an operation in place adds in another order, or there is none.
            needs = [start.input is None or source.address == target.address, start.output is None]
            if any(needs):
                self._use_scratch(start, count * size, count * size, *needs)
            return start
        if collective == "all-gather":
            start.own_begin = sum(each[:rank]) * size
            is_block = source.address == target.address + start.own_begin
            if start.output is None:
                self._use_scratch(start, 0, total, False, True)
            if start.input is None or is_block or start.copies_output or isinstance(count, list):
                # The input is, or is copied to, this rank's block of the output.
                start.is_in_place, start.input = True, None
                start.copies_input = start.copies_output or not is_block
            return start
        inner = max(each) * size
        input_bytes = total if goal.takes_all else inner
        output_bytes = total if goal.gives_all else inner
        # A rank without an input or an output has no array for it, and with counts an array can be a whole block of memory on one rank
        # and a part of one on another, so all ranks use memory for copies.
        copies = not goal.is_for_all_ranks or isinstance(count, list)
        needs = [copies or place is None for place in (start.input, start.output)]
        if any(needs):
            self._use_scratch(start, input_bytes, output_bytes, *needs)
        return start

    def _longest(self, count: tuple[list[int], list[int]]) -> int:
        """Returns the longest block of all ranks.

        Where the host does not compare lengths in each start, such as on a GPU, ranks tell each other all of them here.
        """
        mine = array("Q", [max(*count[0], *count[1])])
        if self.compares_sizes:
            mine.extend([*count[0], *count[1]])
        ranks, rank, longest = self.group.ranks, self.group.rank, 0
        answers = self.arena.settled().exchange(mine.tobytes())
        for peer, theirs in enumerate(answers):
            if len(theirs) != mine.itemsize * len(mine):
                text = f"rank {peer} makes another call than all_to_all with splits; make the same calls in the same order on all ranks"
                raise of_native("mismatch", text, peer)
        tables = [array("Q", theirs) for theirs in answers]
        for peer, table in enumerate(tables):
            longest = max(longest, table[0])
            if not self.compares_sizes:
                continue
            # All ranks compare all pairs, so that all find the same one that differs.
            for other in range(ranks):
                sent, expected = table[1 + other], tables[other][1 + ranks + peer]
                if sent != expected:
                    text = f"ranks disagree: rank {peer} sends {sent} elements to rank {other}, which expects {expected}; splits differ"
                    raise of_native("mismatch", text, other if peer == rank else peer)
        return longest

    def _use_scratch(self, start: Start, input_bytes: int, output_bytes: int, input: bool, output: bool) -> _native.Window:
        """Takes memory for copies of the input, the output or both."""
        self.copied += 1
        output_begin = input_bytes + -input_bytes % 512
        scratch = self._scratch(output_begin + output_bytes, start.is_captured)
        if input:
            start.input, start.copies_input = (scratch, 0), start.source is not None
        if output:
            start.output, start.copies_output = (scratch, output_begin), start.target is not None
        return scratch

    def _scratch(self, nbytes: int, is_captured: bool) -> _native.Window:
        old = (self.captured_scratch[-1] if self.captured_scratch else None) if is_captured else self.scratch
        if old is not None:
            if old.nbytes >= nbytes:
                return old
            nbytes = max(nbytes, 2 * old.nbytes)
        nbytes = max(nbytes, 1 << 16)
        if is_captured:
            # Graphs that are replayed later use the old one.
            self.captured_scratch.append(self.arena.settled().allocate_window(nbytes + -nbytes % 512))
            return self.captured_scratch[-1]
        self.finish()
        if old is not None:
            # A rank that refuses the call takes part in the first exchange, before which nothing may change.
            self.arena.settled().exchange(b"")
            self._await_copies()
            for key in [key for key in self.operations if id(old) in key]:
                self.operations.pop(key).drop()
            self.scratch = None
            self.arena.settled().release(old)
        self.scratch = self.arena.settled().allocate_window(nbytes + -nbytes % 512)
        return self.scratch

    def _await_copies(self) -> None:
        """Waits on the host until copies on streams no longer use the memory for them."""
        if self.streams is not None and self.streams.last_copies is not None:
            self.streams.last_copies[1].synchronize()

    def operation(self, start: Start, root: int, reduction: str, is_beside: bool) -> _native.Operation:
        """Returns the prepared operation of a start, with its size and places set."""
        capturable = start.is_captured
        size = ITEMSIZE[start.dtype]
        places = [place and (place[0], place[1] // size) for place in (start.input, start.output)]
        kind = (start.collective, start.dtype, start.is_in_place, capturable, is_beside, root)
        names = (*kind, *(place and id(place[0]) for place in places))
        is_reduction = self.goal(start.collective, root).is_reduction
        if is_reduction:
            key = (*names, reduction, str(start.count), *(place and place[1] for place in places))
        else:
            key = (*names, "rows" if isinstance(start.count, tuple) else str(start.count) if isinstance(start.count, list) else "")
        kept = self.captured if capturable else self.operations
        found = kept.get(key)
        if found is not None:
            self.hits += 1
            if not capturable:
                self.operations.move_to_end(key)
        else:
            self.misses += 1
            found = self._prepare(start, places, root, reduction, is_beside)
            kept[key] = found
            if len(self.operations) > _OPERATIONS_MAX:
                self.operations.popitem(last=False)[1].drop()
        if not is_reduction:
            if self.compares_sizes:
                self._compare_size((*names[:3], root, str(start.count), start.pitch is not None))
            input, output = (place and place[1] for place in places)
            found.resize(start.count, None if start.is_in_place else input, output)
        return found

    def _compare_size(self, size: tuple) -> None:
        if size in self.sizes:
            self.sizes.move_to_end(size)
            return
        # With splits, every rank has sizes of its own.
        mine = repr(size[:4] if size[-1] else size[:5])
        for rank, theirs in enumerate(self.arena.settled().exchange(mine.encode())):
            found = theirs.decode(errors="replace")
            if found != mine:
                text = (
                    f"ranks disagree: rank {rank} gave collective, type, in place, root and elements of a block {found}, this rank {mine}"
                )
                raise of_native("mismatch", text, rank)
        self.sizes[size] = None
        if len(self.sizes) > _SIZES_MAX:
            self.sizes.popitem(last=False)

    def _prepare(self, start: Start, places: list, root: int, reduction: str, is_beside: bool) -> _native.Operation:
        options: dict[str, Any] = {
            "root": root,
            "in_place": start.is_in_place,
            "capturable": start.is_captured,
            "beside_compute": is_beside,
        }
        ranks, size = self.group.ranks, ITEMSIZE[start.dtype]
        goal = self.goal(start.collective, root)
        if goal.is_reduction:
            options |= {"reduction": reduction, "output": places[1]}
            if not start.is_in_place:
                options["input"] = places[0]
            return self.arena.settled().prepare(start.collective, start.dtype, start.count, **options)
        # The largest operation that its windows can hold, so that one operation serves all sizes and places.
        takes, gives = (ranks if all_blocks else 1 for all_blocks in (goal.takes_all, goal.gives_all))
        windows = [place[0] if place else None for place in places]
        if start.is_in_place:
            count, begin = windows[1].nbytes // (gives * size), None
        elif windows[0] is windows[1]:
            count = windows[1].nbytes // ((takes + gives) * size)
            begin = gives * count
        else:
            count, begin = min(windows[0].nbytes // (takes * size), windows[1].nbytes // (gives * size)), 0
        if isinstance(start.count, tuple):
            count = ([count] * ranks, [count] * ranks)
        elif isinstance(start.count, list):
            count = start.count
            begin = begin and (sum(count) if gives > 1 else max(count))
        options["output"] = (windows[1], 0)
        if begin is not None:
            options["input"] = (windows[0], begin)
        return self.arena.settled().prepare(start.collective, start.dtype, count, resizable=True, check_starts=True, **options)

    def _start(
        self, collective: str, source: View | None, target: View | None, count: Any, root: int, reduction: str, is_beside: bool, output: Any
    ) -> Future:
        self.finish()
        start = self.plan(collective, source, target, count, root)
        for copy in start.copies_in():
            ctypes.memmove(*copy)
        prepared = self.operation(start, root, reduction, is_beside)
        prepared.start()

        def finish() -> None:
            for copy in start.copies_out():
                ctypes.memmove(*copy)

        self.open = Future(prepared, lambda: output, finish)
        return self.open


class Start:
    """Describes one collective call: the places of input and output, and the copies before and after it."""

    def __init__(self, collective: str, dtype: str, count: Any, source: View | None, target: View | None, is_captured: bool):
        self.is_captured = is_captured
        self.collective, self.dtype, self.count, self.source, self.target = collective, dtype, count, source, target
        self.input: Place | None = None
        self.output: Place | None = None
        self.is_in_place = self.copies_input = self.copies_output = False
        # The byte of the output at which this rank's block begins, in place.
        self.own_begin = 0
        # The elements of a row, if the blocks have sizes that other ranks do not know.
        self.pitch: int | None = None

    def copies_in(self) -> list[Copy]:
        """Returns the copies before the start: destination, source and bytes."""
        if self.pitch is not None:
            return [(row, block, nbytes) for row, block, nbytes in self._rows(self.input, self.count[0], self.source) if nbytes]
        if not self.copies_input:
            return []
        window, begin = self.output if self.is_in_place else self.input
        return [(window.address + begin + self.own_begin, self.source.address, self.source.nbytes)]

    def copies_out(self) -> list[Copy]:
        """Returns the copies after the start."""
        if self.pitch is not None:
            return [(block, row, nbytes) for row, block, nbytes in self._rows(self.output, self.count[1], self.target) if nbytes]
        if not self.copies_output:
            return []
        window, begin = self.output
        return [(self.target.address, window.address + begin, self.target.nbytes)]

    def _rows(self, place: Place, lens: list[int], array: View) -> list[Copy]:
        size, block, rows = ITEMSIZE[self.dtype], array.address, []
        for rank, length in enumerate(lens):
            rows.append((place[0].address + place[1] + rank * self.pitch * size, block, length * size))
            block += length * size
        return rows


def _device(device: tuple[int, int]) -> str:
    names = {1: "the CPU", 2: "GPU {} of CUDA", 10: "GPU {} of ROCm"}
    return names.get(device[0], "a device of another kind").format(device[1])

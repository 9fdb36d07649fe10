"""Collectives on arrays of the caller. This module looks at the arrays, and the native one makes the calls."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from peerlane import _native
from peerlane._arena import Arena
from peerlane._arguments import flag, limit, shown, whole, wholes
from peerlane._arrays import CPU, View, view
from peerlane._errors import Error, InvalidArgument
from peerlane._group import Future


class Collectives:
    """Makes collective calls on arrays for one group."""

    def __init__(self, group: _native.Group):
        self.group = group
        self.arena = Arena(group)
        self.device = tuple(group.memory_device)
        self.is_cpu = self.device == CPU
        # The last start of the host, whose arrays are in use.
        self.open: Future | None = None
        self.streams: Any = None
        # What `peerlane.torch` keeps for products of matrices.
        self.matmuls: Any = None
        self.goals: dict[tuple[str, int], _native.Goal] = {}

    def call(self, collective: str, input: Any, output: Any, *, counts: Sequence[int] | None = None,
             splits: tuple[Sequence[int], Sequence[int]] | None = None, root: int = 0, reduction: str = "sum", stream: Any = None,
             wait: bool = True, timeout: float | None = None, beside_compute: bool | None = None) -> Any:  # fmt: skip
        """Starts a collective, and waits for it if `wait` is set."""
        is_plain = counts is None and splits is None and stream is None and wait is True and timeout is None
        if is_plain and self.streams is not None and self.streams.try_start(collective, root, reduction, input, output, beside_compute):
            return output
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
            if beside_compute is not None:
                flag("beside_compute", beside_compute)
            if not isinstance(reduction, str):
                raise InvalidArgument(f"reduction is {shown(reduction)}, expected a string")
            if counts is not None:
                counts = wholes("counts", counts, self.group.ranks)
            if splits is not None:
                splits = self._splits(collective, splits)
            source, target = self._views(collective, input, output, root)
        except Error as error:
            self.tell_refusal(error, collective, splits is not None)
            raise

        elements = (source or target).type
        places = [seen and (seen.address, seen.count) for seen in (source, target)]
        arguments = (collective, root, elements.dtype, elements.unit, *places, counts, splits, reduction, beside_compute)
        # The exchange comes before the calls that follow it on all ranks.
        if self.arena.exchange is not None:
            self.arena.settled()
        if self.is_cpu:
            return self._call_on_host(arguments, (source, target), output, wait, timeout)
        if self.streams is None:
            from peerlane._gpu import Streams

            self.streams = Streams(self.group, self.arena)
        future = self.streams.start(arguments, source, target, stream, wait)
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
        """Tells the other ranks that this rank refuses the arguments of the call that they make."""
        if collective is not None and not has_splits and self.group.note_call_refusal(collective, str(error)):
            return
        with suppress(Error):  # a group that has ended says so in the next call
            group = self.arena.settled()
            if has_splits:
                group.refuse_splits(str(error))
            else:
                group.refuse(str(error))

    def finish(self) -> None:
        """Waits for the last start, which the next one of the host must follow."""
        if self.open is not None:
            self.open.wait()
            self.open = None

    def clear(self) -> None:
        """Waits until streams are done with all arrays."""
        if self.streams is not None:
            self.streams.release()

    def report(self) -> dict:
        """Returns the counts of calls and the memory."""
        stats = json.loads(self.group.stats())
        counts = stats["immediate"]
        prepared = {"kept": counts["operations"], "hits": counts["hits"], "misses": counts["calls"] - counts["hits"]}
        memory = {**self.arena.report(), "bytes_for_copies": counts["copy_bytes"]}
        calls = {"calls": counts["calls"], "calls_with_copies": counts["copied"], "paths": stats["paths"]}
        return {**calls, "operations": prepared, "memory": memory}

    def _call_on_host(self, arguments: tuple, arrays: tuple, output: Any, wait: bool, timeout: float | None) -> Any:
        self.finish()
        started = self.group.call(arguments, wait and timeout is None)
        if started is None:
            return output
        # The arrays are kept until the call is complete.
        self.open = Future(started, lambda arrays=arrays: output)
        return self.open.wait(timeout) if wait else self.open

    def _views(self, collective: str, input: Any, output: Any, root: int) -> tuple[View | None, View | None]:
        found = self.goals.get((collective, root))
        if found is None:
            found = self.goals[collective, root] = _native.Goal(collective, root, self.group.rank, self.group.ranks)
        goal = found
        # A broadcast has one array, the input of the root and the output of the others.
        is_broadcast = collective == "broadcast"
        names = ("array", "array") if input is output else ("input", "output")
        source = self._view(names[0], input) if goal.has_input or is_broadcast else None
        if not goal.has_output:
            target = None
        else:
            target = source if source is not None and input is output else self._view(names[1], output)
        writes = not is_broadcast or not goal.has_input
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
        if seen.device != self.device:
            text = f"{name} is on {_device(seen.device)}, expected {_device(self.device)}, the device of this rank's group"
            raise InvalidArgument(text)
        return seen

    def _splits(self, collective: str, splits: Any) -> tuple[list[int], list[int]]:
        if collective != "all-to-all":
            raise InvalidArgument(f"splits are given, expected none: only all-to-all has them, and this is {collective}")
        if not isinstance(splits, (tuple, list)) or len(splits) != 2:
            raise InvalidArgument(
                f"splits is {shown(splits)}, expected a pair of lists: what this rank sends to and receives from each rank"
            )
        # Each number before the sum, to which negative numbers can fit.
        return wholes("splits, send", splits[0]), wholes("splits, receive", splits[1])


def _device(device: tuple[int, int]) -> str:
    names = {1: "the CPU", 2: "GPU {} of CUDA", 10: "GPU {} of ROCm"}
    return names.get(device[0], "a device of another kind").format(device[1])

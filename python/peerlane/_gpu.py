"""Enqueues collectives on streams of a GPU, which PyTorch makes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from peerlane import _native
from peerlane._arena import Arena
from peerlane._arrays import View
from peerlane._errors import Unavailable
from peerlane._group import stream_handle


class StreamFuture:
    """Lets a stream or the host wait for a collective on another stream."""

    def __init__(self, group: _native.Group, stream: Any, event: Any, device: int):
        self._group, self._event, self._device, self._output = group, event, device, None
        # The stream of the call.
        self.stream = stream

    def wait(self, timeout: float | None = None) -> Any:
        """Lets the current stream of the GPU wait, and returns the output. The host does not wait, so `timeout` has no effect."""
        import torch

        self._group.check()
        torch.cuda.current_stream(self._device).wait_event(self._event)
        return self._output

    def then(self, enqueue: Callable[[], None]) -> None:
        """Enqueues more work on the stream of the call by calling `enqueue`. Waits from now on include it."""
        import torch

        with torch.cuda.stream(self.stream):
            enqueue()
            self._event = self.stream.record_event()

    def done(self) -> bool:
        """Returns whether the output is complete."""
        self._group.check()
        return self._event.query()

    def synchronize(self) -> Any:
        """Waits on the host until the output is complete, and raises if the start failed."""
        self._event.synchronize()
        self._group.check()
        return self._output


class Streams:
    """Enqueues the collectives of one group."""

    def __init__(self, group: _native.Group, arena: Arena):
        self.group, self.arena, self.torch = group, arena, _torch()
        # The handle of the current stream costs less than the object.
        self.current_handle = getattr(self.torch._C, "_cuda_getCurrentRawStream", None)
        self.device: int = group.memory_device[1]
        self.side: Any = None
        # The default stream of the GPU, and the events between it and the stream beside it.
        self.default: Any = None
        self.events: Any = None
        # Arrays of work that streams may not have done yet, with the event after it.
        self.in_use: list[tuple[Any, tuple]] = []

    def try_start(self, collective: str, root: int, reduction: str, input: Any, output: Any, beside_compute: bool | None) -> bool:
        """Enqueues a call on plain tensors on the current stream, and returns whether it did.

        It does not if the call exchanges messages or an argument needs a closer look, and if anything else is to be done for the call.
        """
        if self.current_handle is None or self.arena.exchange is not None:
            return False
        if self.in_use:
            # During a capture, no event can be queried.
            if self.torch.cuda.is_current_stream_capturing():
                return False
            self.drop_unused()
        if type(root) is not int or root < 0 or type(reduction) is not str or not (beside_compute is None or type(beside_compute) is bool):
            return False
        handle = self.current_handle(self.device)
        call = (collective, root, reduction, input, output, beside_compute)
        return self.group.try_call_on(*call, handle) if handle else self._try_start_beside_default(call)

    def _try_start_beside_default(self, call: tuple) -> bool:
        """Enqueues a call between the work of the default stream, which the library does not take because it synchronises with all others."""
        if self.default is None:
            cuda = self.torch.cuda
            self.default, self.events = cuda.default_stream(self.device), (cuda.Event(), cuda.Event())
        side = self._side_stream()
        before, after = self.events
        before.record(self.default)
        side.wait_event(before)
        is_started = self.group.try_call_on(*call, side.cuda_stream)
        if is_started:
            after.record(side)
            self.default.wait_event(after)
        return is_started

    def _side_stream(self) -> Any:
        if self.side is None:
            self.side = self.torch.cuda.Stream(self.device)
        return self.side

    def start(self, arguments: tuple, source: View | None, target: View | None, stream: Any, wait: bool) -> StreamFuture | None:
        """Enqueues a call; on a stream of its own unless `wait` is set."""
        torch = self.torch
        current = caller = torch.cuda.current_stream(self.device)
        if stream is not None:
            is_torch = isinstance(stream, torch.cuda.Stream)
            caller = stream if is_torch else torch.cuda.ExternalStream(stream_handle(stream), self.device)
        used = caller
        # The library takes no default stream, which synchronises with all others.
        if caller.cuda_stream == 0 or not wait:
            used = self._side_stream()
            used.wait_stream(caller)
        self.group.call_on(arguments, used.cuda_stream)
        event = None if wait else used.record_event()
        if wait and used is not caller:
            caller.wait_stream(used)
        # Allocators order memory with the current stream, so only work on other streams needs to hold it.
        is_held = not wait or caller is not current
        if is_held or self.in_use:
            with nullcontext() if caller is current else torch.cuda.stream(caller):
                is_captured = torch.cuda.is_current_stream_capturing()
            if not is_captured:  # during which no event can be queried
                self.drop_unused()
                if is_held:
                    self.hold(caller if wait else used, source, target, event=event)
        return None if wait else StreamFuture(self.group, used, event, self.device)

    def hold(self, stream: Any, *arrays: Any, event: Any = None) -> None:
        """Keeps arrays allocated until a stream has done the work that is enqueued on it now, at whose end `event` is, if it is given.

        An allocator such as PyTorch's gives memory away when its last tensor is dropped, and orders this only with the stream of the allocation.
        """
        self.in_use.append((event or stream.record_event(), arrays))

    def drop_unused(self) -> None:
        """Drops the arrays of work that is done."""
        if self.in_use:
            self.in_use = [held for held in self.in_use if not held[0].query()]

    def release(self) -> None:
        """Waits on the host until streams are done with all arrays, and drops them."""
        while self.in_use:
            self.in_use.pop()[0].synchronize()

    def copy_out(self, copies: Any, *arrays: Any) -> None:
        """Enqueues copies between arrays on the current stream by calling `copies`, and keeps the arrays until these have run."""
        copies()
        if not self.torch.cuda.is_current_stream_capturing():
            self.hold(self.torch.cuda.current_stream(self.device), *arrays)


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        text = "collectives on arrays of a GPU need PyTorch for streams: pip install torch; or prepare an operation and use start_on"
        raise Unavailable(text) from None
    return torch

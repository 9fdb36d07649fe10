"""Starts on streams of a GPU, with PyTorch for streams and for copies."""

from __future__ import annotations

from typing import Any

from peerlane import _native
from peerlane._arrays import View
from peerlane._errors import Unavailable
from peerlane._group import stream_handle


class StreamFuture:
    """A start on a stream. Its output is complete for work that is enqueued after `wait`."""

    def __init__(self, group: _native.Group, event: Any, result: Any):
        self._group, self._event, self._result = group, event, result

    def wait(self, timeout: float | None = None) -> Any:
        """Lets the current stream wait for the start, and returns the output. The host does not wait."""
        import torch

        self._group.check()
        torch.cuda.current_stream().wait_event(self._event)
        return self._result

    def done(self) -> bool:
        """Returns whether the output is complete."""
        self._group.check()
        return self._event.query()

    is_completed = done

    def synchronize(self) -> Any:
        """Waits on the host until the output is complete, and raises if the start failed."""
        self._event.synchronize()
        self._group.check()
        return self._result


def start(calls: Any, collective: str, source: View | None, target: View | None, count: Any, root: int, reduction: str,
          stream: Any, result: Any) -> StreamFuture:  # fmt: skip
    """Enqueues a start on a stream, with the copies before and after it."""
    torch = _torch()
    device = calls.group.memory_device[1]
    current = torch.cuda.current_stream(device)
    if stream is not None:
        current = stream if isinstance(stream, torch.cuda.Stream) else torch.cuda.ExternalStream(stream_handle(stream), device)
    used = current
    if current.cuda_stream == 0:
        # The library takes no default stream, which synchronises with all others.
        if getattr(calls, "side_stream", None) is None:
            calls.side_stream, calls.copied_at = torch.cuda.Stream(device), None
        used = calls.side_stream
        used.wait_stream(current)
    with torch.cuda.stream(used):
        planned = calls.plan(collective, source, target, count, root)
        copies = planned.copies_in(), planned.copies_out()
        operation = calls.operation(planned, root, reduction, torch.cuda.is_current_stream_capturing())
        last = getattr(calls, "copied_at", None)
        if (copies[0] or copies[1]) and last is not None and last[0] != used.cuda_stream:
            used.wait_event(last[1])
        for copy in copies[0]:
            _copy(torch, device, *copy)
        operation.start_on(used.cuda_stream)
        for copy in copies[1]:
            _copy(torch, device, *copy)
        event = used.record_event()
        if copies[0] or copies[1]:
            calls.copied_at = (used.cuda_stream, event)
    if used is not current:
        current.wait_stream(used)
    return StreamFuture(calls.group, event, result)


def tensor(torch: Any, memory: _native.Memory) -> Any:
    """Returns a tensor of bytes over memory of the library."""
    return torch.from_dlpack(memory)


def _copy(torch: Any, device: int, to: int, begin: int, nbytes: int) -> None:
    kind = 10 if torch.version.hip else 2
    ends = (torch.from_dlpack(_native.Memory(address, nbytes, "u8", (kind, device), None)) for address in (to, begin))
    destination, source = ends
    destination.copy_(source, non_blocking=True)


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        text = "collectives on arrays of a GPU need PyTorch for streams and copies: pip install torch; or prepare an operation and use start_on"
        raise Unavailable(text) from None
    return torch

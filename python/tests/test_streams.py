"""Which arrays a start on a stream keeps, and how long, with streams and events that only record what happens."""

import importlib
import sys
import types
import weakref

import numpy
import pytest


class Event:
    def __init__(self, stream):
        self.stream, self.is_done, self.is_awaited = stream, False, False

    def query(self):
        return self.is_done

    def synchronize(self):
        self.is_awaited = True


class Stream:
    def __init__(self, number):
        self.cuda_stream, self.events, self.awaited = number, [], []

    def record_event(self):
        self.events.append(Event(self))
        return self.events[-1]

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        self.awaited.append(event)

    def __enter__(self):
        Cuda.current.append(self)

    def __exit__(self, *_):
        Cuda.current.pop()


class Cuda:
    """`torch.cuda`."""

    current = [Stream(7)]
    is_captured = False
    made = 0
    Stream = Stream

    def current_stream(device=None):
        return Cuda.current[-1]

    def stream(stream):
        return stream

    def is_current_stream_capturing():
        return Cuda.is_captured

    def is_initialized():
        return True


class FakeTorch(types.ModuleType):
    """As much of PyTorch as the package imports."""

    __version__ = "2.11.0"
    cuda = Cuda

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        self.__dict__[name] = type(name, (), {})
        return self.__dict__[name]


class Tensor:
    """A tensor that is an array of NumPy."""

    dtype, device = "float32", "cuda:0"

    def __init__(self, values, log):
        self.values, self.log = numpy.array(values, "float32"), log

    @property
    def shape(self):
        return self.values.shape

    def numel(self):
        return self.values.size

    def split(self, lens):
        return [Tensor(part, self.log) for part in numpy.split(self.values, numpy.cumsum(lens)[:-1])]

    def view(self, shape):
        return self

    def copy_(self, other):
        self.log.append(Cuda.current[-1])
        self.values[...] = other.values.reshape(self.shape)


@pytest.fixture
def torch(monkeypatch):
    fake, distributed = FakeTorch("torch"), FakeTorch("torch.distributed")
    distributed.ReduceOp = types.SimpleNamespace(SUM=0, AVG=1, MAX=2, MIN=3)
    fake.distributed = distributed
    monkeypatch.setitem(sys.modules, "torch", fake)
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
    monkeypatch.setattr(Cuda, "current", [Stream(7)])
    monkeypatch.setattr(Cuda, "is_captured", False)
    sys.modules.pop("peerlane._torch", None)
    yield fake
    sys.modules.pop("peerlane._torch", None)


class Group:
    """The native group of a GPU."""

    memory_device = (2, 0)

    def __init__(self):
        self.calls = []

    def check(self):
        pass

    def call_on(self, arguments, stream):
        self.calls.append((arguments, stream))


def streams_of_group():
    from peerlane._gpu import Streams

    return Streams(Group(), types.SimpleNamespace(exchange=None))


class Array:
    pass


def test_a_start_keeps_its_arrays_until_its_stream_is_done_with_them(torch):
    streams = streams_of_group()
    for stream, wait in [(None, False), (Stream(9), False), (Stream(9), True)]:
        source, target = Array(), Array()
        kept = [weakref.ref(source), weakref.ref(target)]
        streams.start((), source, target, stream, wait)
        del source, target
        assert all(array() is not None for array in kept), (stream, wait)
        event = streams.in_use[-1][0]
        # The event is of the stream on which the arrays are used.
        assert event.stream is (stream if wait else streams.side)
        streams.drop_unused()
        assert all(array() is not None for array in kept)
        event.is_done = True
        streams.drop_unused()
        assert all(array() is None for array in kept) and not streams.in_use
    # On the current stream, the allocator orders the memory itself.
    streams.start((), Array(), Array(), None, True)
    assert not streams.in_use
    Cuda.is_captured = True
    streams.start((), Array(), Array(), Stream(9), True)
    assert not streams.in_use


def test_a_call_is_made_on_the_stream_of_the_caller_or_on_one_beside_it(torch):
    streams = streams_of_group()
    streams.start(("on", 1), Array(), Array(), Stream(9), True)
    streams.start(("beside", 2), Array(), Array(), Stream(9), False)
    Cuda.current[0] = Stream(0)
    streams.start(("not on the default stream", 3), Array(), Array(), None, True)
    side = streams.side.cuda_stream
    assert streams.group.calls == [(("on", 1), 9), (("beside", 2), side), (("not on the default stream", 3), side)]


def test_an_event_that_is_late_does_not_keep_the_arrays_of_others(torch):
    streams = streams_of_group()
    for _ in range(3):
        streams.start((), Array(), Array(), None, False)
    streams.in_use[1][0].is_done = True
    streams.drop_unused()
    assert len(streams.in_use) == 2
    waited = [event for event, _ in streams.in_use]
    streams.release()
    assert all(event.is_awaited for event in waited) and not streams.in_use


@pytest.mark.parametrize("is_async", [False, True])
def test_a_list_is_kept_until_its_copies_have_run(torch, is_async):
    module = importlib.import_module("peerlane._torch")
    log, streams = [], streams_of_group()
    group = types.SimpleNamespace(_calls=types.SimpleNamespace(streams=streams))
    flat, tensors = Tensor([1, 2, 3], log), [Tensor([0], log), Tensor([0, 0], log)]
    kept = [weakref.ref(each) for each in (flat, *tensors)]
    values = [each.values for each in tensors]
    other = Stream(11)

    work = module.Work(streams.start((), Array(), Array(), None, False), [flat]) if is_async else None
    work = module._to_list(group, work, flat, tensors)
    assert (work is not None) == is_async
    copied_on = streams.side if is_async else Cuda.current[0]
    assert log == [copied_on] * 2 and [part.tolist() for part in values] == [[1], [2, 3]]
    if is_async:
        # The caller waits for the copies, on another stream than that of the allocation.
        with other:
            work.wait()
        assert work.result() == tensors and other.awaited == [streams.side.events[-1]]

    del flat, tensors, work
    assert all(event.stream is copied_on for event, _ in streams.in_use) and all(each() is not None for each in kept)
    for event in [held[0] for held in streams.in_use]:
        event.is_done = True
    streams.drop_unused()
    assert all(each() is None for each in kept) and not streams.in_use


def test_a_call_on_the_current_stream_drops_what_is_done_before(torch):
    streams = streams_of_group()
    streams.current_handle, taken = lambda device: 7, []
    streams.group.try_call_on = lambda *call: taken.append(call) or True
    streams.start((), Array(), Array(), None, False)
    call = ("all-gather", 0, "sum", Array(), Array(), None)
    assert streams.try_start(*call) and len(streams.in_use) == 1
    streams.in_use[0][0].is_done = True
    Cuda.is_captured = True
    assert not streams.try_start(*call) and len(streams.in_use) == 1, "an event was queried during a capture"
    Cuda.is_captured = False
    assert streams.try_start(*call) and not streams.in_use and len(taken) == 2

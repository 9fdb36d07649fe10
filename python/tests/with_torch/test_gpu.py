"""Ranks that share one GPU: bits, streams, graphs, FSDP2, and that no kernel gathers. Skipped without a GPU."""

import pytest

import peerlane

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from test_fsdp import STEPS, train
from test_process_group import in_ranks
from test_torch import random, with_gloo

import peerlane.torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU of CUDA")
TYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int32]
OPTIONS = {"backend": "cuda", "device": 0, "timeout": 60}


def bits(group):
    torch.cuda.set_device(0)
    size, rank = group.size, group.rank
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    for dtype in TYPES:
        for count in (1, 1000, 300_001):
            expected = torch.cat([random((count,), dtype, each) for each in range(size)])
            for is_own in (False, True):
                for stream in streams:
                    with torch.cuda.stream(stream):

                        def new(count, is_own=is_own, dtype=dtype):
                            if is_own:
                                return peerlane.torch.empty(count, dtype=dtype, group=group)
                            return torch.empty(count, dtype=dtype, device="cuda")

                        source, output = new(count), new(size * count)
                        source.copy_(random((count,), dtype, rank))
                        peerlane.torch.all_gather_into_tensor(output, source, group=group)
                        assert torch.equal(output.cpu(), expected), (dtype, count, is_own)
                        output.zero_()
                        block = output[rank * count : (rank + 1) * count]
                        block.copy_(source)
                        work = peerlane.torch.all_gather_into_tensor(output, block, group=group, async_op=True)
                        work.wait()
                        assert torch.equal(output.cpu(), expected)
                        peerlane.torch.broadcast(source, src=size - 1, group=group)
                        assert torch.equal(source.cpu(), random((count,), dtype, size - 1))
                        wide, swapped = new(size * count), new(size * count)
                        wide.copy_(random((size * count,), dtype, rank))
                        peerlane.torch.all_to_all_single(swapped, wide, group=group)
                        rows = [random((size * count,), dtype, each)[rank * count : (rank + 1) * count] for each in range(size)]
                        assert torch.equal(swapped.cpu(), torch.cat(rows))
                        peerlane.torch.reduce_scatter_tensor(block, wide, group=group)
                        total = random((size * count,), dtype, 0)
                        for each in range(1, size):
                            total += random((size * count,), dtype, each)
                        assert torch.equal(block.cpu(), total[rank * count : (rank + 1) * count])
                        peerlane.torch.all_reduce(wide, group=group)
                        assert torch.equal(wide.cpu(), total)
    group.check()
    with pytest.raises(peerlane.InvalidArgument, match="is on the CPU, expected GPU 0 of CUDA"):
        peerlane.torch.all_reduce(torch.zeros(3), group=group)


def test_bits_are_equal():
    peerlane.spawn(bits, 2, **OPTIONS)


def graphs(group):
    torch.cuda.set_device(0)
    size, rank = group.size, group.rank
    source = peerlane.torch.empty(1000, dtype=torch.float32, group=group)
    output = peerlane.torch.empty(1000 * size, dtype=torch.float32, group=group)
    other = torch.empty(1000 * size, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        source.add_(1)
        peerlane.torch.all_gather_into_tensor(output, source, group=group)
        peerlane.torch.all_gather_into_tensor(other, source, group=group)
    source.fill_(10 * rank)
    for replay in range(1, 21):
        graph.replay()
        expected = torch.repeat_interleave(10.0 * torch.arange(size) + replay, 1000)
        assert torch.equal(output.cpu(), expected) and torch.equal(other.cpu(), expected)
    group.check()
    group.barrier()


def test_replays_of_a_graph():
    peerlane.spawn(graphs, 2, **OPTIONS)


def kernels(group):
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.set_device(0)
    output = peerlane.torch.empty(group.size << 20, dtype=torch.float32, group=group)
    block = output[group.rank << 20 : (group.rank + 1) << 20]
    peerlane.torch.all_gather_into_tensor(output, block, group=group)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(5):
            peerlane.torch.all_gather_into_tensor(output, block, group=group)
        torch.cuda.synchronize()
    names = sorted({event.name for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA})
    print(f"rank {group.rank}: the device executed {names}")
    assert all("emcpy" in name or "emset" in name or "ynchron" in name or "vent" in name for name in names), names
    return names


def test_no_kernel_gathers():
    names = peerlane.spawn(kernels, 2, **OPTIONS)
    assert any("emcpy" in name for name in names[0]), names


def equal_losses(precision):
    torch.cuda.set_device(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    expected, _, _ = train(None, precision, device="cuda")
    losses, report, _ = train("gather", precision, device="cuda")
    assert losses == expected and len(set(losses)) == STEPS, (losses, expected)
    assert report["calls"] >= STEPS * 3 and not report["fallbacks"] and report["group"]["calls_with_copies"] == 0, report


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_losses_of_fsdp_are_equal(precision):
    peerlane.spawn(with_gloo, 2, equal_losses, precision)


def lost(group):
    import os
    import signal

    torch.cuda.set_device(0)
    output = peerlane.torch.empty(1000 * group.size, group=group)
    block = output[1000 * group.rank : 1000 * (group.rank + 1)]
    peerlane.torch.all_gather_into_tensor(output, block, group=group)
    torch.cuda.synchronize()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(peerlane.PeerLost) as caught:
        for _ in range(1000):
            peerlane.torch.all_gather_into_tensor(output, block, group=group)
            torch.cuda.synchronize()
    assert caught.value.rank == 1
    group.abandon()


def test_a_lost_rank_is_named():
    with pytest.raises(peerlane.Error, match="status -9"):
        peerlane.spawn(lost, 2, **OPTIONS)


def dropped(group):
    """Drops the tensors of a call while the stream that waits for it is still busy, and takes their memory for others."""
    torch.cuda.set_device(0)
    side, count = torch.cuda.Stream(), 1 << 20
    for turn in range(10):
        source = torch.full((count,), float(turn), device="cuda")
        blocks = [torch.empty(count, device="cuda") for _ in range(group.size)]
        work = peerlane.torch.all_gather(blocks, source, group=group, async_op=True)
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            work.wait()
        addresses = {block.data_ptr() for block in blocks}
        del work, source, blocks
        others = [torch.full((count,), -1.0, device="cuda") for _ in range(group.size + 1)]
        reused = addresses & {other.data_ptr() for other in others}
        torch.cuda.synchronize()
        assert all(bool((other == -1.0).all()) for other in others), (turn, reused)
    group.check()


def test_tensors_are_kept_until_their_copies_have_run():
    peerlane.spawn(dropped, 2, **OPTIONS)


def as_backend():
    """Makes calls on the GPU and compares them with those of Gloo on the CPU, which serves the same process group."""
    torch.cuda.set_device(0)
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in (1, 1000, 300_001):
        for is_async in (False, True):
            own = random((count,), torch.int32, rank)

            def both(call, *tensors, is_async=is_async, count=count):
                """Makes a call with tensors of the CPU and with copies on the GPU."""
                copies = [tensor.cuda() for tensor in tensors]
                for each in (tensors, copies):
                    work = call(*each, async_op=is_async)
                    if is_async:
                        work.wait()
                assert all(torch.equal(tensor, copy.cpu()) for tensor, copy in zip(tensors, copies)), (count, is_async)

            both(dist.all_reduce, own.clone())
            both(lambda tensor, **options: dist.all_reduce(tensor, dist.ReduceOp.MAX, **options), own.clone())
            both(dist.all_gather_into_tensor, torch.zeros(size * count, dtype=torch.int32), own)
            outputs = [torch.zeros_like(own) for _ in range(size)]
            both(lambda *tensors, **options: dist.all_gather(list(tensors[1:]), tensors[0], **options), own, *outputs)
            both(dist.reduce_scatter_tensor, torch.zeros_like(own), own.repeat(size))
            both(dist.all_to_all_single, torch.zeros_like(own.repeat(size)), own.repeat(size))
            both(lambda tensor, **options: dist.broadcast(tensor, size - 1, **options), own.clone())
    objects = [None] * size
    dist.all_gather_object(objects, rank)
    assert objects == list(range(size))
    dist.barrier()
    with pytest.raises(peerlane.Unavailable, match="new_group"):
        dist.send(torch.ones(1, device="cuda"), (rank + 1) % size)

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).cuda())
    model(torch.ones(2, 8, device="cuda") * rank).sum().backward()
    gradient = model.module.weight.grad.clone()
    dist.broadcast(gradient, 0)
    assert torch.equal(gradient, model.module.weight.grad)


def compiled_and_recorded():
    """Compiles a function with ops as a whole, and replays a graph of it."""
    torch.cuda.set_device(0)
    rank, size, name = dist.get_rank(), dist.get_world_size(), peerlane.torch.name_of()
    weight = random((64, 64), torch.float32, 3).cuda()

    def layer(x):
        whole = torch.ops.peerlane.all_gather(x, name)
        return x + torch.ops.peerlane.reduce_scatter(torch.relu(whole @ weight), "sum", name)

    x = random((16, 64), torch.float32, rank).cuda()
    expected = layer(x)
    found = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(found, expected)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layer(x)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            output = layer(x)
    for turn in range(3):
        x.copy_(random((16, 64), torch.float32, rank + size * turn))
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(output, layer(x)), turn
    torch.cuda.synchronize()


@pytest.mark.parametrize("function", [as_backend, compiled_and_recorded])
def test_the_backend_on_a_shared_gpu(function):
    options = {"backend": "cuda", "device": 0, "timeout": 60}
    in_ranks(2, function, backend="cpu:gloo,cuda:peerlane", options=options)

"""Starts beside streams of one GPU that ranks share: products, graphs, lost ranks, and blocks that never depart. Skipped without a GPU."""

import os
import signal
import time

import pytest

import peerlane

pytest.importorskip("torch")

import torch
from test_matmul import gathered_products, in_place, reduced_products

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU of CUDA")
OPTIONS = {"backend": "cuda", "device": 0, "timeout": 60}
COUNT = 100_000


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("body", [gathered_products, reduced_products, in_place])
def test_products_are_those_of_the_whole(body, ranks):
    peerlane.spawn(body, ranks, **OPTIONS)


def graphs(group):
    """Replays two exchanges whose blocks depart behind one stream, and are read on another one."""
    torch.cuda.set_device(0)
    exchange = group.prepare("all-to-all", "f32", COUNT, arrivals=True, departures=True, capturable=True)
    arrivals, departures = exchange.arrivals, exchange.departures
    blocks = torch.from_dlpack(exchange.input).view(group.size, COUNT)
    seen, round = torch.zeros(group.size, COUNT, device="cuda"), torch.zeros(1, device="cuda")
    writer, reader, graph = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    group.barrier()

    with torch.cuda.graph(graph, stream=writer):
        for _ in range(2):
            round.add_(100)
            with exchange.start_beside(writer) as start:
                for receiver, _ in departures:
                    blocks[receiver].copy_(round + 10 * group.rank + receiver)
                    start.depart_on(writer, receiver)
                for sender, _ in arrivals:
                    start.wait_on(reader, sender)
                    with torch.cuda.stream(reader):
                        seen[sender].copy_(torch.from_dlpack(start.block(sender)))

    for replay in range(1, 6):
        graph.replay()
        torch.cuda.synchronize()
        expected = torch.tensor([200.0 * replay + 10 * sender + group.rank for sender in range(group.size)])
        assert torch.equal(seen[:, 0].cpu(), expected) and torch.equal(seen[:, -1].cpu(), expected)
    exchange.check()
    group.barrier()
    exchange.drop()


@pytest.mark.parametrize("ranks", [2, 3])
def test_graphs_contain_arrivals_and_departures(ranks):
    peerlane.spawn(graphs, ranks, **OPTIONS)


def lost(group, path):
    torch.cuda.set_device(0)
    gather = group.prepare("all-gather", "f32", COUNT, arrivals=True)
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    seen = torch.zeros(COUNT, device="cuda")
    torch.cuda.synchronize()
    order = gather.arrivals
    group.barrier()
    if group.rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    begun = time.monotonic()
    start = gather.start_beside(streams[0])
    for sender, _ in order:
        start.wait_on(streams[1], sender)
        with torch.cuda.stream(streams[1]):
            seen.copy_(torch.from_dlpack(start.block(sender)))
    with pytest.raises(peerlane.PeerLost) as caught:
        start.wait_block(1)
    assert caught.value.rank == 1
    # The streams go on over undefined bytes.
    for stream in streams:
        stream.synchronize()
    path.joinpath(str(group.rank)).write_text(str(time.monotonic() - begun))
    with pytest.raises(peerlane.PeerLost):
        start.finish()
    group.abandon()


def test_streams_that_wait_for_a_lost_rank_go_on(tmp_path):
    with pytest.raises(peerlane.Error, match="status -9"):
        peerlane.spawn(lost, 3, tmp_path, **OPTIONS)
    waited = {path.name: float(path.read_text()) for path in tmp_path.iterdir()}
    assert sorted(waited) == ["0", "2"] and max(waited.values()) < 20, waited


def held(group):
    torch.cuda.set_device(0)
    exchange = group.prepare("all-to-all", "f32", COUNT, departures=True, timeout=3)
    stream = torch.cuda.Stream()
    start = exchange.start_beside(stream)
    for receiver in range(group.size if group.rank == 0 else 0):
        start.depart_on(stream, receiver)
    if group.rank == 0:
        start.finish()
    else:
        with pytest.raises(peerlane.InvalidArgument, match="has not departed"):
            start.finish()

    stream.synchronize()
    with pytest.raises(peerlane.Timeout, match="has not let chunk 0 of block . depart") as caught:
        for _ in range(200):
            exchange.check()
            time.sleep(0.1)
    assert caught.value.rank == 1
    group.abandon()


def test_a_block_that_never_departs_is_named():
    peerlane.spawn(held, 2, **OPTIONS)

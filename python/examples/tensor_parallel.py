"""Runs a tensor-parallel perceptron in three ways: eager, compiled as a whole, and as a graph, on Peerlane and on the process group beside it.

    torchrun --nproc-per-node 2 tensor_parallel.py
    torchrun --nproc-per-node 2 tensor_parallel.py --device cpu

Tokens are sharded between the layers: an all-gather before the first matrix, a reduce-scatter after the second one. The outputs of each library are equal bit by bit in all of
its ways. Rank 0 prints the median times in µs, by turns.
"""

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import peerlane.torch


class Layer(torch.nn.Module):
    """Columns of the first matrix and rows of the second one."""

    def __init__(self, width, hidden, name):
        super().__init__()
        ranks = dist.get_world_size()
        self.up, self.down = torch.nn.Linear(width, hidden // ranks, bias=False), torch.nn.Linear(hidden // ranks, width, bias=False)
        self.name = name

    def forward(self, x):
        ops = torch.ops.peerlane
        whole = ops.all_gather(x, self.name)
        return x + ops.reduce_scatter(self.down(torch.relu(self.up(whole))), "sum", self.name)


class Reference(Layer):
    """The same with the functional collectives of PyTorch."""

    def forward(self, x):
        whole = functional.all_gather_tensor(x, 0, self.name)
        parts = functional.reduce_scatter_tensor(self.down(torch.relu(self.up(whole))), "sum", 0, self.name)
        return x + functional.wait_tensor(parts)


def model_of(kind, options, name, device, dtype):
    torch.manual_seed(dist.get_rank())
    return torch.nn.Sequential(*(kind(options.width, 4 * options.width, name) for _ in range(options.layers))).to(device, dtype)


def recorded(model, x):
    """Returns a function that replays a graph of the model."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(x)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            output = model(x)
    torch.cuda.synchronize()

    def replay(_):
        graph.replay()
        return output

    return replay


def seconds(call, x, device, repeat):
    if device.type == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(repeat):
        call(x)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) / repeat


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=64, help="of all ranks")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--compiler", default="inductor", help="a backend of torch.compile, such as aot_eager")
    options = parser.parse_args()
    device, dtype = torch.device(options.device), torch.float32
    if device.type == "cuda":
        device, dtype = torch.device("cuda", int(os.environ["LOCAL_RANK"])), torch.bfloat16
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", device_id=device if device.type == "cuda" else None)
    group = dist.new_group(backend="peerlane")
    x = torch.randn(options.tokens // dist.get_world_size(), options.width, device=device, dtype=dtype)

    ways, outputs = {}, {}
    for library, kind, name in (
        ("peerlane", Layer, peerlane.torch.name_of(group)),
        ("torch.distributed", Reference, dist.group.WORLD.group_name),
    ):
        model = model_of(kind, options, name, device, dtype)
        ways[library, "eager"] = model
        ways[library, "compiled"] = torch.compile(model, fullgraph=True, backend=options.compiler)
        if device.type == "cuda":
            ways[library, "graph"] = recorded(model, x)
        for each in [way for way in ways if way[0] == library]:
            outputs[each] = ways[each](x).clone()

    for (library, way), output in outputs.items():
        # A compiler may fuse the products differently, so only the ways without it have equal bits for sure.
        if way == "graph" and not torch.equal(output, outputs[library, "eager"]):
            raise SystemExit(f"rank {dist.get_rank()}: {library}, {way}: the output differs from the eager one")
        torch.testing.assert_close(output, outputs["peerlane", "eager"], rtol=2e-2, atol=2e-2)

    times = {way: [] for way in ways}
    for turn in range(options.rounds + 1):
        for way, call in ways.items():
            dist.barrier()
            elapsed = torch.tensor([seconds(call, x, device, 10)], dtype=torch.float64, device=device)
            dist.all_reduce(elapsed, dist.ReduceOp.MAX)
            if turn:
                times[way].append(1e6 * elapsed.item())
    if dist.get_rank() == 0:
        for (library, way), values in times.items():
            print(f"{library:>18}, {way:<9} {statistics.median(values):10.1f} µs")
        equal = all(
            torch.equal(outputs["peerlane", "compiled"], outputs["peerlane", way]) for library, way in ways if library == "peerlane"
        )
        print(f"outputs of peerlane are equal bit by bit in all ways: {equal}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

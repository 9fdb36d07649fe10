"""Measures products of matrices whose rows are gathered, or whose products are reduced, beside PyTorch's fused ops.

    torchrun --nproc-per-node 2 overlapped_matmul.py --json out.json
    torchrun --nproc-per-node 4 overlapped_matmul.py --shape 8192 8192 4096 --streams 1 2 3 4
    torchrun --nproc-per-node 2 overlapped_matmul.py --device cpu --shape 64 32 16

A shape is m, k and n of a product: an all-gather gives each rank all m rows, of which it has m / ranks, and the products of a reduce-scatter have k / ranks inner
elements on each rank. In each round the ways take turns; the table has the median time of the slowest rank, and its ratio to the product alone. `torch fused` is
`torch.ops.symm_mem`, `sequence` the collective of PyTorch and the product one after the other, and `peerlane` the functions of `peerlane.torch`; `in place`, the rows are written to the
gathered tensor. Results are compared: products of gathered rows bit by bit, and reduced ones up to the rounding of sums.
"""

import argparse
import functools
import itertools
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # which defines the fused ops

import peerlane.torch

SHAPES = [(32768, 16384, 8192), (16384, 8192, 8192), (8192, 8192, 4096)]


def numbers(*shape, seed, device, dtype):
    """Returns normal numbers: the power that a product takes depends on them."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=dtype)


def gathers(shape, group, options, device, dtype):
    """Returns the ways to multiply gathered rows, by name, and a check of a result."""
    (m, k, n), ranks, rank = shape, dist.get_world_size(), dist.get_rank()
    shard = numbers(m // ranks, k, seed=rank, device=device, dtype=dtype)
    factor = numbers(k, n, seed=99, device=device, dtype=dtype)
    whole = torch.empty(m, k, device=device, dtype=dtype)
    own = peerlane.torch.empty(m, k, dtype=dtype, group=group)
    part = own[rank * m // ranks : (rank + 1) * m // ranks]
    part.copy_(shard)

    def sequence():
        dist.all_gather_into_tensor(whole, shard)
        return whole @ factor

    def fused():
        return torch.ops.symm_mem.fused_all_gather_matmul(shard, [factor], 0, dist.group.WORLD.group_name)[1][0]

    def overlapped(rows, **how):
        return peerlane.torch.all_gather_matmul(rows, [factor], 0, group, **how)[1][0]

    sequence()
    # Products of the rows of one rank by themselves: equal bits need equal shapes.
    expected = torch.cat([block @ factor for block in whole.chunk(ranks)])
    found = {"alone": lambda: torch.mm(whole, factor), "sequence": sequence}
    if device.type == "cuda" and not options.share:
        found["torch fused"] = fused
    for streams, chunks in itertools.product(options.streams, options.chunks):
        how = {"streams": streams, "chunks": chunks}
        found[f"peerlane, {streams} streams, {chunks} chunks"] = functools.partial(overlapped, shard, **how)
        found[f"peerlane in place, {streams} streams, {chunks} chunks"] = functools.partial(overlapped, part, **how)

    def is_right(name, result):
        is_exact = name.startswith("peerlane") and name.endswith("1 chunks")
        return torch.equal(result, expected) if is_exact else torch.allclose(result, expected, rtol=0.05, atol=2)

    return found, is_right


def reductions(shape, group, options, device, dtype):
    """Returns the ways to reduce products, by name, and a check of a result."""
    (m, k, n), ranks, rank = shape, dist.get_world_size(), dist.get_rank()
    first = numbers(m, k // ranks, seed=rank, device=device, dtype=dtype)
    second = numbers(k // ranks, n, seed=50 + rank, device=device, dtype=dtype)
    part = torch.empty(m // ranks, n, device=device, dtype=dtype)

    def sequence():
        dist.reduce_scatter_tensor(part, first @ second)
        return part

    def fused():
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(first, second, "sum", 0, dist.group.WORLD.group_name)

    def overlapped(**how):
        return peerlane.torch.matmul_reduce_scatter(first, second, "sum", 0, group, **how)

    expected = sequence().clone()
    found = {"alone": lambda: torch.mm(first, second), "sequence": sequence}
    if device.type == "cuda" and not options.share:
        found["torch fused"] = fused
    for streams, chunks in itertools.product(options.streams, options.chunks):
        how = {"streams": streams, "chunks": chunks}
        found[f"peerlane, {streams} streams, {chunks} chunks"] = functools.partial(overlapped, **how)
    # Each library adds in its own order and precision.
    return found, lambda name, result: name == "alone" or torch.allclose(result, expected, rtol=0.05, atol=4)


def measure(call, device, repeat):
    """Returns the time of one call in seconds: on the device, of several in a row."""
    if device.type == "cpu":
        begun = time.perf_counter()
        for _ in range(repeat):
            call()
        return (time.perf_counter() - begun) / repeat
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeat):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeat


def median_times(ways, device, options):
    times = {name: [] for name in ways}
    for call in ways.values():
        # Peerlane learns in the first calls for how long the program holds results.
        for _ in range(options.warmup):
            call()
    for turn in range(options.rounds + 1):
        for name, call in ways.items():
            dist.barrier()
            seconds = torch.tensor([measure(call, device, options.repeat)], dtype=torch.float64, device=device)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if turn:  # The first round prepares operations.
                times[name].append(seconds.item())
    return {name: 1e6 * statistics.median(values) for name, values in times.items()}


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--share", action="store_true", help="all ranks use GPU 0, with gloo for PyTorch; times then mean nothing")
    parser.add_argument("--shape", type=int, nargs=3, action="append", metavar=("M", "K", "N"))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=70)
    parser.add_argument("--json", help="write the results to a file")
    options = parser.parse_args()
    device, dtype = torch.device(options.device), torch.float32
    on_nccl = device.type == "cuda" and not options.share
    if device.type == "cuda":
        device, dtype = torch.device("cuda", 0 if options.share else int(os.environ["LOCAL_RANK"])), torch.bfloat16
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_nccl else "gloo", device_id=device if on_nccl else None)
    group = peerlane.torch.group_of(None)

    rows = []
    for collective, make in (("all-gather", gathers), ("reduce-scatter", reductions)):
        for shape in [tuple(shape) for shape in options.shape or SHAPES]:
            ways, is_right = make(shape, group, options, device, dtype)
            for name, call in ways.items():
                if not is_right(name, call()):
                    raise SystemExit(f"rank {dist.get_rank()}: {collective}, {shape}: the result of {name} is wrong")
            for name, micros in (times := median_times(ways, device, options)).items():
                ratio = micros / times["alone"]
                rows.append({"collective": collective, "shape": shape, "way": name, "us": round(micros, 1), "ratio": round(ratio, 4)})
                if dist.get_rank() == 0:
                    print(f"{collective:>14} {shape!s:>22} {name:<38} {micros:10.1f} µs  {ratio:6.3f}", flush=True)
    if options.json and dist.get_rank() == 0:
        about = {"torch": torch.__version__, "ranks": dist.get_world_size(), "device": str(device)}
        with open(options.json, "w") as file:
            json.dump({"about": about, "rows": rows}, file, indent=1)
    peerlane.torch.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Measures calls on tensors of GPUs beside starts of a prepared operation and beside `torch.distributed`.

torchrun --nproc-per-node 2 call_time.py

Each rank needs a GPU. The times of the host are those until a call has returned, medians of 30 rounds of 20 calls, between which the GPU is idle. The times
on the stream are those of 50 calls in a row. Rank 0 prints microseconds.
"""

import os
import statistics
import time

import torch
import torch.distributed as dist

import peerlane.torch

ROUNDS, CALLS = 30, 20


def on_host(call):
    """Returns the time until a call has returned."""
    times = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - begun) / CALLS * 1e6)
        torch.cuda.synchronize()
    return statistics.median(times)


def on_stream(call, calls=50):
    """Returns the time of a call among many on the current stream."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / calls * 1e3


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = peerlane.torch.group_of(None)
    stream = torch.cuda.Stream()
    if rank == 0:
        print("all-gather, KiB in all: start of a prepared operation, own tensors, other tensors, torch.distributed; host and stream, us")
    for kib in (4, 64, 1024):
        count = kib * 1024 // 2 // ranks
        window = group.window(4 * kib * 1024)
        prepared = group.prepare("all-gather", "bf16", count, input=(window, count * ranks), output=(window, 0), resizable=True)
        own = [peerlane.torch.empty(size, dtype=torch.bfloat16, group=group) for size in (count * ranks, count)]
        other = [torch.empty(size, dtype=torch.bfloat16, device="cuda") for size in (count * ranks, count)]
        calls = [
            lambda prepared=prepared: prepared.start_on(stream),
            lambda own=own: peerlane.torch.all_gather_into_tensor(*own, group),
            lambda other=other: peerlane.torch.all_gather_into_tensor(*other, group),
            lambda other=other: dist.all_gather_into_tensor(*other),
        ]
        row = []
        with torch.cuda.stream(stream):
            for call in calls:
                for _ in range(5):
                    call()
                torch.cuda.synchronize()
                dist.barrier()
                row.append(f"{on_host(call):.1f} {on_stream(call):.1f}")
                dist.barrier()
        if rank == 0:
            print(f"{kib}: {', '.join(row)}")
        torch.cuda.synchronize()
    peerlane.torch.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

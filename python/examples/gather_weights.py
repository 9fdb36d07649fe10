"""Serves a model whose weights are sharded: gathers each layer on copy engines while the layer before it computes.

    torchrun --nproc-per-node 2 gather_weights.py --layers 8 --width 4096
    torchrun --nproc-per-node 2 gather_weights.py --device cpu --layers 3 --width 256

Each rank stores a part of the rows of every weight. Two buffers of the library hold the whole weights of two layers in turn. Every rank computes a batch of
its own, and compares its result with that of the whole model.
"""

import argparse
import os
import time

import torch

import peerlane
import peerlane.torch


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--share", action="store_true", help="all ranks use GPU 0")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    device = torch.device("cpu")
    backend = {"backend": "host"}
    if options.device == "cuda":
        device = torch.device("cuda", 0 if options.share else int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        backend = {"backend": "cuda", "device": device.index}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with peerlane.init(**backend) as group:
        width, rows = options.width, options.width // group.size
        random = torch.Generator().manual_seed(0)
        model = [(torch.randn(width, width, generator=random) / width**0.5).to(dtype) for _ in range(options.layers)]
        # The shards are in memory of the library too, so that engines read them without a copy.
        shards = []
        for weight in model:
            shard = peerlane.torch.empty(rows, width, dtype=dtype, group=group)
            shard.copy_(weight[group.rank * rows : (group.rank + 1) * rows])
            shards.append(shard)
        buffers = [peerlane.torch.empty(group.size * rows, width, dtype=dtype, group=group) for _ in range(2)]
        x = torch.randn(options.batch, width, generator=torch.Generator().manual_seed(group.rank)).to(device, dtype)

        def gather(layer):
            return peerlane.torch.all_gather_into_tensor(buffers[layer % 2], shards[layer], group=group, async_op=True)

        def serve():
            y, work = x, gather(0)
            for layer in range(options.layers):
                work.wait()
                # The next gather begins now. Its stream waits for the work that reads the other buffer.
                work = gather(layer + 1) if layer + 1 < options.layers else None
                y = torch.nn.functional.silu(y @ buffers[layer % 2].T)
            return y

        expected = x
        for weight in model:
            expected = torch.nn.functional.silu(expected @ weight.to(device).T)
        times = []
        for _ in range(options.repeat):
            begun = time.perf_counter()
            y = serve()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begun)
            group.check()
            if not torch.equal(y, expected):
                raise SystemExit(f"rank {group.rank}: the result differs from that of the whole model")
        if group.rank == 0:
            print(f"{group.size} ranks, {options.layers} layers of {width} x {width}: equal to the whole model, {1e3 * min(times):.2f} ms")
            print(group.report())


if __name__ == "__main__":
    main()

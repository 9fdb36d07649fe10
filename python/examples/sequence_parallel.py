"""Exchanges columns of matrices, as sequence parallelism does before and after attention, and compares Peerlane with PyTorch.

    torchrun --nproc-per-node 2 sequence_parallel.py --rows 8192 --columns 4096
    torchrun --nproc-per-node 2 sequence_parallel.py --device cpu --rows 64 --columns 256

Each rank has `--rows` tokens with the values of all heads. The first exchange gives it the values of its heads of all tokens, and the second is the way back. Peerlane
copies columns from and to the matrix. `peerlane, blocks` and PyTorch exchange contiguous blocks, which a kernel copies before the first exchange and after the second.
All outputs are compared bit by bit. The times are medians of the slowest rank over rounds in which the ways take turns.
"""

import argparse
import os

import torch
import torch.distributed as dist
from benchmark import median_times

import peerlane.torch


def exchanges(group, device, stream, rows, columns):
    """Returns for both directions the ways by name, each with its output."""
    ranks = dist.get_world_size()
    width = columns // ranks
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(dist.get_rank())).bfloat16().to(device)
    blocks, received, result = (torch.empty(ranks, rows, width, dtype=torch.bfloat16, device=device) for _ in range(3))

    def in_blocks(tensor):
        return tensor.view(rows, ranks, width).transpose(0, 1)

    def prepared(source, **options):
        operation = group.prepare("all-to-all", "bf16", rows * width, capturable=device.type == "cuda", **options)
        memory = torch.from_dlpack(operation.input)
        memory.copy_(source.reshape(-1))
        start = operation.run if device.type == "cpu" else lambda: operation.start_on(stream)
        return start, memory.view(ranks, rows, width), lambda: torch.from_dlpack(operation.output).view(ranks, rows, width)

    def of_torch():
        dist.all_to_all_single(blocks, in_blocks(matrix).contiguous())

    def back_of_torch():
        dist.all_to_all_single(received, blocks)
        in_blocks(result).copy_(received)

    of_torch()
    start, _, output = prepared(matrix, matrix=(rows, "input"))
    start_back, _, output_back = prepared(blocks, matrix=(rows, "output"))
    start_blocks, input_blocks, output_blocks = prepared(matrix)
    start_back_blocks, _, received_blocks = prepared(blocks)
    result_blocks = torch.empty_like(result)

    def with_blocks():
        input_blocks.copy_(in_blocks(matrix))
        start_blocks()

    def back_with_blocks():
        start_back_blocks()
        in_blocks(result_blocks).copy_(received_blocks())

    return {
        "to heads": {
            "peerlane": (start, output),
            "peerlane, blocks": (with_blocks, output_blocks),
            "torch.distributed": (of_torch, lambda: blocks),
        },
        "back": {
            "peerlane": (start_back, output_back),
            "peerlane, blocks": (back_with_blocks, lambda: result_blocks),
            "torch.distributed": (back_of_torch, lambda: result),
        },
    }


def captured(exchange, stream):
    """Returns a function that replays the exchange from a graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        exchange()
    return graph.replay


def compare(direction, ways, device, stream, options):
    """Measures ways by turns, compares their outputs, and prints a line."""
    if options.graph:  # NCCL's graphs must be dropped before its communicators, so they end with this function.
        ways = {name: (captured(exchange, stream), output) for name, (exchange, output) in ways.items()}
    medians = median_times(ways, device, options)
    expected, *others = (output().view(torch.int16) for _, output in ways.values())
    if not all(torch.equal(expected, other) for other in others):
        raise SystemExit(f"rank {dist.get_rank()}: the outputs of the exchange {direction} differ")
    if dist.get_rank() == 0:
        print(f"{direction}: " + "  ".join(f"{name} {value:.1f} µs" for name, value in medians.items()), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--share", action="store_true", help="all ranks use GPU 0, with gloo for PyTorch; times then mean nothing")
    parser.add_argument("--rows", type=int, default=8192, help="tokens of a rank")
    parser.add_argument("--columns", type=int, default=4096, help="values of a token, a multiple of the number of ranks")
    parser.add_argument("--graph", action="store_true", help="replay each exchange from a graph")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeat", type=int, default=20)
    options = parser.parse_args()
    device, backend, stream = torch.device("cpu"), {"backend": "host"}, None
    if options.device == "cuda":
        device = torch.device("cuda", 0 if options.share else int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        stream = torch.cuda.Stream()
        torch.cuda.set_stream(stream)
        backend = {"backend": "cuda", "device": device.index}
    on_nccl = device.type == "cuda" and not options.share
    dist.init_process_group("nccl" if on_nccl else "gloo", device_id=device if on_nccl else None)
    if options.columns % dist.get_world_size():
        parser.error(f"--columns is {options.columns}, expected a multiple of {dist.get_world_size()}, the number of ranks")
    group = peerlane.torch.group_of(**backend)
    for direction, ways in exchanges(group, device, stream, options.rows, options.columns).items():
        compare(direction, ways, device, stream, options)
    peerlane.torch.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

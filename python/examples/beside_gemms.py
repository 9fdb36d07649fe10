"""Measures where gathers by copy engines pay: beside the compute of a transformer block, four ways by turns.

    torchrun --nproc-per-node 2 beside_gemms.py --json out.json
    torchrun --nproc-per-node 2 beside_gemms.py --device cpu --widths 64 --tokens 32

| situation | what runs |
| --- | --- |
| backward | the backward pass of a block, beside the gather of the weights of another block, as in FSDP2 |
| weights | the forward pass of a block without gradients, beside the same gather, as in inference with sharded weights |
| sequence | a gather of activations, two matrices and a reduce-scatter, each after the other, as in sequence parallelism |

The ways are PyTorch's default, memory of the process group, the zero-CTA policy of NCCL and Peerlane. A row has the time of the compute alone, the time of all of it in each way,
and the ratio of Peerlane's to the best of the others with its 95 % interval: a gain if it is below 0.98, a loss if it is above 1.02, otherwise a draw. Outputs are compared bit by
bit. Rank 0 prints the table.
"""

import argparse
import json
import os
import statistics

import torch
import torch.distributed as dist
from benchmark import measure
from train_fsdp2 import Block, ratio_of, zero_cta_group

import peerlane.torch

HEADS = 16
# A ratio outside of these is more than noise.
GAIN, LOSS = 0.98, 1.02


class Way:
    """One library, with its memory and its calls."""

    def __init__(self, new, group, api=dist):
        self.new, self.group, self.api = new, group, api

    def gather(self, output, input, is_beside):
        self.api.all_gather_into_tensor(output, input, group=self.group, **self.options(is_beside))

    def reduce_scatter(self, output, input):
        self.api.reduce_scatter_tensor(output, input, group=self.group, **self.options(False))

    def options(self, is_beside):
        """Returns the option by which Peerlane learns whether kernels run beside a call."""
        return {"beside_compute": is_beside} if self.api is peerlane.torch else {}


def ways(device, dtype):
    """Returns the ways by name."""

    def plain(count):
        return torch.empty(count, dtype=dtype, device=device)

    def of_process_group(group):
        return lambda count: group._get_backend(device).allocate_tensor(count, dtype=dtype, device=device)

    found = {"default": Way(plain, dist.group.WORLD)}
    options = {"backend": "host"}
    if device.type == "cuda":
        found["process group"] = Way(of_process_group(dist.group.WORLD), dist.group.WORLD)
        zero = zero_cta_group(device)
        found["zero-CTA"] = Way(of_process_group(zero), zero)
        options = {"backend": "cuda", "device": device.index}
    group = peerlane.torch.group_of(**options)
    found["Peerlane"] = Way(lambda count: peerlane.torch.empty(count, dtype=dtype, group=group), group, peerlane.torch)
    return found


class BesideBlock:
    """The compute of a block, beside the gather of the weights of another one."""

    def __init__(self, way, situation, width, tokens, device, dtype):
        torch.manual_seed(0)
        self.way, self.is_backward = way, situation == "backward"
        self.block = Block(width, HEADS).to(device, dtype)
        self.x = torch.randn(1, tokens, width, device=device, dtype=dtype, requires_grad=self.is_backward)
        self.output = self.block(self.x).sum() if self.is_backward else None
        ranks, rank = dist.get_world_size(), dist.get_rank()
        count = sum(parameter.numel() for parameter in self.block.parameters()) // ranks * ranks
        self.weights = way.new(count)
        self.own = self.weights[rank * count // ranks : (rank + 1) * count // ranks]
        self.own.copy_(torch.arange(self.own.numel(), device=device).remainder_(251).add_(rank).to(dtype))
        self.side = torch.cuda.Stream() if device.type == "cuda" else None

    def compute(self):
        if self.is_backward:
            torch.autograd.backward(self.output, inputs=list(self.block.parameters()), retain_graph=True)
        else:
            with torch.no_grad():
                self.block(self.x)

    def run(self):
        if self.side is None:
            self.way.gather(self.weights, self.own, True)
            self.compute()
            return
        current = torch.cuda.current_stream()
        self.side.wait_stream(current)
        with torch.cuda.stream(self.side):
            self.way.gather(self.weights, self.own, True)
        self.compute()
        current.wait_stream(self.side)

    def result(self):
        return self.weights


class Sequence:
    """A gather of activations, two matrices of a tensor-parallel perceptron, and a reduce-scatter."""

    def __init__(self, way, _, width, tokens, device, dtype):
        torch.manual_seed(0)
        self.way, ranks = way, dist.get_world_size()
        self.up = torch.randn(width, 4 * width // ranks, device=device, dtype=dtype) / width**0.5
        self.down = torch.randn(4 * width // ranks, width, device=device, dtype=dtype) / width**0.5
        tokens = tokens // ranks * ranks
        self.own, self.all = way.new(tokens // ranks * width).view(-1, width), way.new(tokens * width).view(-1, width)
        self.partial, self.sums = way.new(tokens * width).view(-1, width), way.new(tokens // ranks * width).view(-1, width)
        self.own.copy_(torch.randn(self.own.shape, device=device, dtype=dtype))

    def compute(self):
        torch.matmul(torch.relu(self.all @ self.up), self.down, out=self.partial)

    def run(self):
        self.way.gather(self.all, self.own, False)
        self.compute()
        self.way.reduce_scatter(self.sums, self.partial)

    def result(self):
        return self.sums


def compare(situation, width, tokens, found, device, dtype, options):
    """Returns the row of a situation."""
    kind = Sequence if situation == "sequence" else BesideBlock
    cases = {name: kind(way, situation, width, tokens, device, dtype) for name, way in found.items()}
    results = {}
    for name, case in cases.items():
        case.run()
        results[name] = case.result().clone()
    # Two ranks have one sum in any order.
    if situation != "sequence" or dist.get_world_size() == 2:
        different = [name for name, result in results.items() if not torch.equal(result, results["default"])]
        if different:
            raise SystemExit(f"rank {dist.get_rank()}: {situation} of {tokens} x {width} differs from the default: {different}")
    calls = {"compute": cases["default"].compute, **{name: case.run for name, case in cases.items()}}
    times = {name: [] for name in calls}
    for turn in range(options.rounds + 1):
        for name, call in calls.items():
            seconds = torch.tensor([measure(call, device, options.repeat)], dtype=torch.float64, device=device)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if turn:  # The first round prepares operations.
                times[name].append(seconds.item())
    medians = {name: 1e3 * statistics.median(values) for name, values in times.items()}
    best = min((name for name in found if name != "Peerlane"), key=medians.get)
    ratio, low, high = ratio_of(times["Peerlane"], times[best])
    verdict = "gain" if high < GAIN else "loss" if low > LOSS else "draw"
    return {
        "situation": situation, "width": width, "tokens": tokens, "ms": medians, "best": best, "ratio": [ratio, low, high], "verdict": verdict,
    }  # fmt: skip


def numbers(text):
    return [int(part) for part in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--situations", default="backward,weights,sequence")
    parser.add_argument("--widths", type=numbers, default=[2048, 4096, 8192])
    parser.add_argument("--tokens", type=numbers, default=[512, 2048, 8192], help="tokens of a rank in one pass")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", help="write the rows to a file")
    options = parser.parse_args()
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", device_id=device if device.type == "cuda" else None)
    found, rows = ways(device, dtype), []
    for situation in options.situations.split(","):
        for width in options.widths:
            for tokens in options.tokens:
                row = compare(situation, width, tokens, found, device, dtype, options)
                rows.append(row)
                if dist.get_rank() == 0:
                    times = "  ".join(f"{name} {value:.3f}" for name, value in row["ms"].items())
                    ratio, low, high = row["ratio"]
                    text = f"{situation:9} {width:5} x {tokens:5}  ms: {times}  ÷ {row['best']} {ratio:.3f} [{low:.3f}, {high:.3f}]  {row['verdict']}"
                    print(text, flush=True)
    if dist.get_rank() == 0 and options.json:
        with open(options.json, "w") as file:
            json.dump({"torch": torch.__version__, "ranks": dist.get_world_size(), "options": vars(options), "rows": rows}, file, indent=1)
    peerlane.torch.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

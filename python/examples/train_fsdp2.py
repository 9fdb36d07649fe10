"""Trains a transformer with FSDP2 and random tokens, and compares ways to gather its parameters.

    torchrun --nproc-per-node 2 train_fsdp2.py                        # one way: Peerlane
    torchrun --nproc-per-node 2 train_fsdp2.py --compare --json out.json
    torchrun --nproc-per-node 2 train_fsdp2.py --device cpu --width 64 --layers 2 --vocabulary 128 --length 16

`--compare` trains one model whose steps use PyTorch's default, memory of the process group, the zero-CTA policy of NCCL and Peerlane in turn, so that all see
the same state of the machine. With `--reduce-scatter`, one more way reduces the gradients by Peerlane too. It prints the time of a step, with the ratio to the
default and its 95 % interval, and the time that the host takes to allocate outputs and to start gathers. Then it compares the losses of two deterministic runs
and every byte of the gathered parameters. Ranks that share a GPU (`--share`) use gloo, because NCCL refuses that.
"""

import argparse
import json
import math
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import peerlane.fsdp
import peerlane.torch


class Block(torch.nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.attention_in, self.attention_out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.attention_in(self.norms[0](x)).chunk(3, dim=-1)
        )
        mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norms[1](x))))


class Transformer(torch.nn.Module):
    def __init__(self, options):
        super().__init__()
        self.tokens = torch.nn.Embedding(options.vocabulary, options.width)
        self.layers = torch.nn.ModuleList(Block(options.width, options.heads) for _ in range(options.layers))
        self.norm, self.head = torch.nn.LayerNorm(options.width), torch.nn.Linear(options.width, options.vocabulary, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class FromProcessGroup:
    """A gather by NCCL in memory that the process group allocates, so that NCCL registers it."""

    def __init__(self, group, device):
        self.group, self.backend = group, group._get_backend(device)

    def allocate(self, size, *, dtype, device):
        return self.backend.allocate_tensor(math.prod(size), dtype=dtype, device=device).view(*size)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=self.group, async_op=async_op)


class Default:
    """What FSDP2 does without custom collectives."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class DefaultReduction(Default):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group=group, async_op=async_op)


class Timed:
    """A gather, with the time that the host takes for it in a step."""

    def __init__(self, gather, reduction):
        self.gather, self.reduction = gather, reduction
        self.allocations, self.calls = [], []

    def allocate(self, size, *, dtype, device):
        begun = time.perf_counter()
        tensor = self.gather.allocate(size, dtype=dtype, device=device)
        self.allocations.append(time.perf_counter() - begun)
        return tensor

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        begun = time.perf_counter()
        work = self.gather(output_tensor, input_tensor, group, async_op)
        self.calls.append(time.perf_counter() - begun)
        return work

    def taken(self):
        """Returns the seconds since the last call."""
        seconds = sum(self.allocations), sum(self.calls)
        self.allocations.clear(), self.calls.clear()
        return seconds


class Training:
    def __init__(self, options, device):
        torch.manual_seed(0)
        self.options, self.device = options, device
        with torch.device("meta"):
            model = Transformer(options)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        model.to_empty(device=device)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter.to_local(), std=0.02)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
        self.random = torch.Generator().manual_seed(1 + dist.get_rank())
        self.parameters = sum(parameter.numel() for parameter in model.parameters())

    def use(self, way):
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(way)
                module.set_custom_reduce_scatter(way.reduction)

    def step(self):
        """Returns the loss, and the time on the host with the device synchronised."""
        size = (self.options.batch, self.options.length + 1)
        tokens = torch.randint(self.options.vocabulary, size, generator=self.random).to(self.device)
        synchronize(self.device)
        begun = time.perf_counter()
        logits = self.model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        synchronize(self.device)
        return loss.item(), time.perf_counter() - begun


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def zero_cta_group(device):
    """Returns a process group whose collectives run on copy engines where NCCL has such."""
    policy = dist.ProcessGroupNCCL.Options()
    policy.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO
    return dist.new_group(backend="nccl", pg_options=policy, device_id=device)


def ways(options, device):
    """Returns the ways to compare by name."""
    found = {"PyTorch's default": Default()}
    if device.type == "cuda" and not options.share:
        found["memory of the process group"] = FromProcessGroup(dist.group.WORLD, device)
        found["zero-CTA policy"] = FromProcessGroup(zero_cta_group(device), device)
    backend = {"backend": "cuda", "device": device.index} if device.type == "cuda" else {"backend": "host"}
    group = peerlane.torch.group_of(**backend)
    if options.reserve:
        group.reserve(options.reserve << 20)
    found["Peerlane"] = gather = peerlane.fsdp.AllGather(group)
    timed = {name: Timed(each, DefaultReduction()) for name, each in found.items()}
    if options.reduce_scatter:
        timed["Peerlane, gradients too"] = Timed(gather, gather.reduce_scatter)
    return timed


def ratio_of(values, others):
    """Returns the geometric mean of the ratios of pairs, and its 95 % interval."""
    logs = [math.log(value / other) for value, other in zip(values, others)]
    middle = statistics.fmean(logs)
    half = 1.96 * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
    return [math.exp(middle), math.exp(middle - half), math.exp(middle + half)]


def compare(options, device):
    training, found = Training(options, device), ways(options, device)
    times, hosts, peaks = {name: [] for name in found}, {name: [] for name in found}, {}
    for turn in range(options.warm_up + options.steps):
        # Each turn begins with another one, so that none has the best place.
        names = list(found)
        names = names[turn % len(names) :] + names[: turn % len(names)]
        for name in names:
            training.use(found[name])
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            _, seconds = training.step()
            # The slowest rank decides.
            slowest = torch.tensor([seconds], dtype=torch.float64, device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            taken = found[name].taken()
            if turn >= options.warm_up:
                times[name].append(slowest.item())
                hosts[name].append(taken)
            if device.type == "cuda":
                # Memory of libraries is not in the statistics of PyTorch.
                free, total = torch.cuda.mem_get_info()
                peaks[name] = {"allocated": torch.cuda.max_memory_allocated(), "used_on_device": total - free}
    base = times["PyTorch's default"]
    rows = []
    for name, values in times.items():
        ratio, *interval = ratio_of(values, base)
        median = statistics.median(values)
        allocations, calls = (1e3 * statistics.median(part) for part in zip(*hosts[name]))
        host = {"allocate_ms": allocations, "calls_ms": calls}
        rows.append({"way": name, "step_ms": 1e3 * median, "ratio": ratio, "interval": interval, **host, **peaks.get(name, {})})
    to_others = {name: ratio_of(times["Peerlane"], values) for name, values in times.items() if name != "Peerlane"}
    del training
    return {"rows": rows, "peerlane_to": to_others, "report": found["Peerlane"].gather.report(), "ways": found}


def losses(options, device, way):
    training, found = Training(options, device), []
    if way is not None:
        training.use(way)
    for _ in range(options.check_steps):
        found.append(training.step()[0])
    return found, training


def equal_bytes(training, found):
    """Returns whether all ways give the same bytes for every module."""
    sums = {}
    for name, way in found.items():
        training.use(way)
        sums[name] = []
        for module in training.model.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
                for parameter in module.parameters(recurse=module is not training.model):
                    full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
                    sums[name].append(full.detach().contiguous().view(torch.uint8).to(torch.int64).sum().item())
                    sums[name].append(hash(full.detach().float().flatten()[:4096].cpu().numpy().tobytes()))
                module.reshard()
    first = next(iter(sums.values()))
    return all(each == first for each in sums.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--share", action="store_true", help="all ranks use GPU 0")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--compare", action="store_true", help="take turns with PyTorch's ways")
    parser.add_argument("--reduce-scatter", action="store_true", help="compare one more way, in which Peerlane reduces the gradients too")
    parser.add_argument("--check-steps", type=int, default=5, help="deterministic steps whose losses are compared")
    parser.add_argument("--reserve", type=int, default=0, metavar="MIB", help="memory that Peerlane takes in advance")
    parser.add_argument("--json", help="write the results to a file")
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", 0 if options.share else int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    on_nccl = options.device == "cuda" and not options.share
    dist.init_process_group("nccl" if on_nccl else "gloo", device_id=device if on_nccl else None)
    result = {"torch": torch.__version__, "ranks": dist.get_world_size(), "options": vars(options)}
    if on_nccl:
        result["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    if device.type == "cuda":
        result["gpu"] = torch.cuda.get_device_name()
    if options.compare:
        compared = compare(options, device)
        found = compared.pop("ways")
        result |= compared
        # Ordered sums, so that equal inputs give equal bits.
        torch.use_deterministic_algorithms(True, warn_only=True)
        default, training = losses(options, device, None)
        del training
        own, training = losses(options, device, found["Peerlane"])
        result["losses_equal"] = default == own
        result["bytes_equal"] = equal_bytes(training, found)
        result["parameters"] = training.parameters
    else:
        training = Training(options, device)
        backend = {"backend": "cuda", "device": device.index} if device.type == "cuda" else {"backend": "host"}
        gather = peerlane.fsdp.enable(training.model, **backend)
        times = [training.step() for _ in range(options.warm_up + options.steps)][options.warm_up :]
        result |= {"loss": times[-1][0], "step_ms": 1e3 * statistics.median(seconds for _, seconds in times), "report": gather.report()}
        result["parameters"] = training.parameters
        if device.type == "cuda":
            result["peak_bytes"] = torch.cuda.max_memory_allocated()
    if rank == 0:
        for row in result.get("rows", []):
            low, high = row["interval"]
            print(
                f"{row['way']:30} {row['step_ms']:9.2f} ms  {row['ratio']:.4f} of the default [{low:.4f}, {high:.4f}]  "
                f"host: allocate {row['allocate_ms']:.3f} ms, calls {row['calls_ms']:.3f} ms"
            )
        print(json.dumps({name: value for name, value in result.items() if name != "rows"}, indent=1))
        if options.json:
            with open(options.json, "w") as file:
                json.dump(result, file, indent=1)
    peerlane.torch.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

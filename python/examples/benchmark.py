"""Measures collectives of Peerlane beside `torch.distributed` and symmetric memory, and compares every byte.

    torchrun --nproc-per-node 2 benchmark.py --json out.json --plot out.svg
    torchrun --nproc-per-node 4 benchmark.py --collective all-reduce --min-bytes 4K --max-bytes 1G
    torchrun --nproc-per-node 4 benchmark.py --device cpu --max-bytes 4M

Sizes are those of the larger of input and output. Each size is measured in rounds in which the ways take turns; the table has the median time of the slowest rank,
and the ratio of the fastest of the others to the fastest of Peerlane. `peerlane` is a call on tensors of `empty`, `peerlane, copied` one on tensors of PyTorch, which
are copied, `backend` the same call of torch.distributed on the backend "peerlane". `--graph` measures replays of a graph of 20 calls. The plot needs matplotlib.
"""

import argparse
import json
import os
import statistics
import time

import torch
import torch.distributed as dist

import peerlane.torch


def parse_bytes(text):
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1].upper()] if text[-1].upper() in units else int(text)


class Case:
    """One collective with the inputs and outputs of a size."""

    def __init__(self, collective, total_bytes, device, empty):
        self.collective, self.size, rank = collective, dist.get_world_size(), dist.get_rank()
        self.dtype = torch.uint8 if collective in ("all-gather", "all-to-all") else torch.bfloat16
        count = total_bytes // self.dtype.itemsize // self.size * self.size
        part = count // self.size
        inputs = {"all-gather": part}.get(collective, count)
        outputs = {"reduce-scatter": part}.get(collective, count)
        self.input, self.output = empty(inputs, self.dtype), empty(outputs, self.dtype)
        # Small whole numbers, whose sums have no rounding.
        self.input.copy_(torch.arange(inputs, device=device).add_(rank * 7).remainder_(31).to(self.dtype))

    def call(self, api, group):
        """Returns a function that makes the call of `torch.distributed`, or of a module with its functions."""
        if self.collective == "all-gather":
            return lambda: api.all_gather_into_tensor(self.output, self.input, group=group)
        if self.collective == "all-to-all":
            return lambda: api.all_to_all_single(self.output, self.input, group=group)
        if self.collective == "reduce-scatter":
            return lambda: api.reduce_scatter_tensor(self.output, self.input, group=group)
        # In place, so the values grow; `result` begins again.
        return lambda: api.all_reduce(self.output, group=group)

    def result(self, call):
        """Returns the output of one call."""
        if self.collective == "all-reduce":
            self.output.copy_(self.input)
        call()
        return self.output.cpu()


def ways(device, group, backend, total_bytes, options, on_nccl):
    """Returns the case and the call of each way, by name."""

    def own(count, dtype):
        return peerlane.torch.empty(count, dtype=dtype, group=group)

    def plain(count, dtype):
        return torch.empty(count, dtype=dtype, device=device)

    found = {}
    for name, empty, api, served in (
        ("peerlane", own, peerlane.torch, group),
        ("peerlane, copied", plain, peerlane.torch, group),
        ("backend", plain, dist, backend),
        ("torch.distributed", plain, dist, dist.group.WORLD),
    ):
        case = Case(options.collective, total_bytes, device, empty)
        found[name] = case, case.call(api, served)
    if on_nccl and options.collective == "all-gather":
        import torch.distributed._symmetric_memory as symmetric

        case = Case(options.collective, total_bytes, device, lambda count, dtype: symmetric.empty(count, dtype=dtype, device=device))
        symmetric.rendezvous(case.input, dist.group.WORLD)

        def gather():
            name = dist.group.WORLD.group_name
            case.output = torch.ops._c10d_functional.wait_tensor(torch.ops.symm_mem._low_contention_all_gather(case.input, name))

        found["symmetric memory"] = case, gather
    return found


def recorded(call, repeat):
    """Returns a function that replays a graph of several calls."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(repeat):
                call()
    torch.cuda.synchronize()
    return graph.replay


def measure(collective, device, repeat):
    """Returns the time of one collective in seconds: on the device, of many in a row."""
    if device.type == "cpu":
        begun = time.perf_counter()
        for _ in range(repeat):
            collective()
        return (time.perf_counter() - begun) / repeat
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeat):
        collective()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeat


def median_times(calls, device, options):
    """Returns the time of each way in µs: the median of the slowest rank over rounds in which the ways take turns."""
    times = {name: [] for name in calls}
    for turn in range(options.rounds + 1):
        for name, call in calls.items():
            elapsed = measure(call, device, 1) / options.repeat if options.graph else measure(call, device, options.repeat)
            seconds = torch.tensor([elapsed], dtype=torch.float64, device=device)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if turn:  # The first round prepares operations.
                times[name].append(seconds.item())
    return {name: 1e6 * statistics.median(values) for name, values in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--share", action="store_true", help="all ranks use GPU 0, with gloo for PyTorch; times then mean nothing")
    parser.add_argument("--collective", choices=["all-gather", "all-reduce", "reduce-scatter", "all-to-all"], default="all-gather")
    parser.add_argument("--graph", action="store_true", help="measure replays of a graph of --repeat calls")
    parser.add_argument("--min-bytes", type=parse_bytes, default="64K")
    parser.add_argument("--max-bytes", type=parse_bytes, default="16M")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--json", help="write the results to a file")
    parser.add_argument("--plot", help="draw the times to a file; needs matplotlib")
    options = parser.parse_args()
    if options.graph and (options.share or options.device == "cpu"):
        parser.error("--graph records calls of NCCL too, which needs a GPU for each rank")
    device, backend = torch.device("cpu"), {"backend": "host"}
    if options.device == "cuda":
        device = torch.device("cuda", 0 if options.share else int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        backend = {"backend": "cuda", "device": device.index}
    on_nccl = device.type == "cuda" and not options.share
    dist.init_process_group("nccl" if on_nccl else "gloo", device_id=device if on_nccl else None)
    group, rows = peerlane.torch.group_of(**backend), []
    process_group = dist.new_group(backend="peerlane", pg_options=backend)
    total_bytes = options.min_bytes
    while total_bytes <= options.max_bytes:
        found = ways(device, group, process_group, total_bytes, options, on_nccl)
        outputs = {name: case.result(call) for name, (case, call) in found.items()}
        expected = outputs["torch.distributed"]
        different = [name for name, output in outputs.items() if not torch.equal(output, expected)]
        if different:
            raise SystemExit(f"rank {dist.get_rank()}: the outputs of {total_bytes} bytes differ from torch.distributed: {different}")
        calls = {name: recorded(call, options.repeat) if options.graph else call for name, (_, call) in found.items()}
        medians = median_times(calls, device, options)
        theirs = [value for name, value in medians.items() if name in ("torch.distributed", "symmetric memory")]
        ours = [value for name, value in medians.items() if name not in ("torch.distributed", "symmetric memory")]
        ratio = min(theirs) / min(ours)
        rows.append({"bytes": total_bytes, "microseconds": medians, "ratio": ratio})
        if dist.get_rank() == 0:
            times = "  ".join(f"{name} {value:.1f} µs" for name, value in medians.items())
            print(f"{total_bytes:>12} B  {times}  ratio {ratio:.2f}", flush=True)
        total_bytes *= 4
        # NCCL waits in its end for graphs that hold its calls.
        del calls, found, outputs, expected
    if dist.get_rank() == 0:
        result = {
            "torch": torch.__version__,
            "ranks": dist.get_world_size(),
            "options": vars(options),
            "rows": rows,
            "report": group.report(),
        }
        if options.json:
            with open(options.json, "w") as file:
                json.dump(result, file, indent=1)
        if options.plot:
            plot(rows, options.plot)
    peerlane.torch.close()
    dist.destroy_process_group()


def plot(rows, file):
    import matplotlib

    matplotlib.use("svg" if file.endswith(".svg") else "agg")
    from matplotlib import pyplot

    for name in rows[0]["microseconds"]:
        pyplot.loglog([row["bytes"] for row in rows], [row["microseconds"][name] for row in rows], marker="o", label=name)
    pyplot.xlabel("bytes")
    pyplot.ylabel("time of one call, µs")
    pyplot.legend()
    pyplot.savefig(file)


if __name__ == "__main__":
    main()

"""Measures all-gathers of Peerlane beside PyTorch's default and its symmetric memory, and compares every byte.

    torchrun --nproc-per-node 2 benchmark.py --json out.json --plot out.svg
    torchrun --nproc-per-node 4 benchmark.py --device cpu --max-bytes 4M

Sizes are those of the output. Each size is measured in rounds in which the ways take turns; the table has the median time of the slowest rank, and the ratio of the
fastest of the others to Peerlane in memory of the library. `peerlane, copied` gathers tensors of PyTorch, which are copied. The plot needs matplotlib.
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


def ways(device, group, output_bytes, use_symmetric):
    """Returns functions that gather by name, each with its output."""
    rank, size = dist.get_rank(), dist.get_world_size()
    count = output_bytes // size

    def filled(tensor):
        return tensor.copy_(torch.arange(count, dtype=torch.int64).add(rank * 7).to(torch.uint8))

    own_output = peerlane.torch.empty(size * count, dtype=torch.uint8, group=group)
    own_input = filled(peerlane.torch.empty(count, dtype=torch.uint8, group=group))
    output, plain = (torch.empty(length, dtype=torch.uint8, device=device) for length in (size * count, count))
    filled(plain)
    copied = torch.empty_like(output)
    found = {
        "peerlane": (lambda: peerlane.torch.all_gather_into_tensor(own_output, own_input, group=group), lambda: own_output),
        "peerlane, copied": (lambda: peerlane.torch.all_gather_into_tensor(copied, plain, group=group), lambda: copied),
        "torch.distributed": (lambda: dist.all_gather_into_tensor(output, plain), lambda: output),
    }
    if use_symmetric:
        import torch.distributed._symmetric_memory as symmetric

        source = filled(symmetric.empty(count, dtype=torch.uint8, device=device))
        symmetric.rendezvous(source, dist.group.WORLD)
        result = [None]

        def gather():
            name = dist.group.WORLD.group_name
            result[0] = torch.ops._c10d_functional.wait_tensor(torch.ops.symm_mem._low_contention_all_gather(source, name))

        found["symmetric memory"] = (gather, lambda: result[0])
    return found


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


def median_times(ways, device, options):
    """Returns the time of each way in µs: the median of the slowest rank over rounds in which the ways take turns."""
    times = {name: [] for name in ways}
    for turn in range(options.rounds + 1):
        for name, (collective, _) in ways.items():
            seconds = torch.tensor([measure(collective, device, options.repeat)], dtype=torch.float64, device=device)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if turn:  # The first round prepares operations.
                times[name].append(seconds.item())
    return {name: 1e6 * statistics.median(values) for name, values in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--share", action="store_true", help="all ranks use GPU 0, with gloo for PyTorch; times then mean nothing")
    parser.add_argument("--min-bytes", type=parse_bytes, default="64K")
    parser.add_argument("--max-bytes", type=parse_bytes, default="16M")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--json", help="write the results to a file")
    parser.add_argument("--plot", help="draw the times to a file; needs matplotlib")
    options = parser.parse_args()
    device, backend = torch.device("cpu"), {"backend": "host"}
    if options.device == "cuda":
        device = torch.device("cuda", 0 if options.share else int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        backend = {"backend": "cuda", "device": device.index}
    on_nccl = device.type == "cuda" and not options.share
    dist.init_process_group("nccl" if on_nccl else "gloo", device_id=device if on_nccl else None)
    group, rows = peerlane.torch.group_of(**backend), []
    output_bytes = options.min_bytes
    while output_bytes <= options.max_bytes:
        gathers = ways(device, group, output_bytes, on_nccl)
        medians = median_times(gathers, device, options)
        outputs = [output() for _, output in gathers.values()]
        if not all(torch.equal(outputs[0], other) for other in outputs[1:]):
            raise SystemExit(f"rank {dist.get_rank()}: the outputs of {output_bytes} bytes differ")
        others = [value for name, value in medians.items() if not name.startswith("peerlane")]
        rows.append({"bytes": output_bytes, "microseconds": medians, "ratio": min(others) / medians["peerlane"]})
        if dist.get_rank() == 0:
            print(f"{output_bytes:>12} B  " + "  ".join(f"{name} {value:.1f} µs" for name, value in medians.items()), flush=True)
        output_bytes *= 4
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
    pyplot.xlabel("bytes of the output")
    pyplot.ylabel("time of one all-gather, µs")
    pyplot.legend()
    pyplot.savefig(file)


if __name__ == "__main__":
    main()

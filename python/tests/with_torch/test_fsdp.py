"""FSDP2 with Peerlane's gathers over gloo on the CPU: losses are bit-equal to PyTorch's default."""

import os
import subprocess
import sys
import warnings

import pytest

import peerlane

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from test_torch import with_gloo

STEPS = 20
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
BACKENDS = {"cpu": {"backend": "host"}, "cuda": {"backend": "cuda", "device": 0}}


class Unused(torch.nn.Module):
    """A model with layers of different sizes, one of which is used in every second step."""

    def __init__(self):
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer
        self.layers = torch.nn.ModuleList(layer(32, 4, width, batch_first=True, dropout=0.0) for width in (64, 48, 100))
        self.head = torch.nn.Linear(32, 7)
        self.step = 0

    def forward(self, x):
        self.step += 1
        for index, layer in enumerate(self.layers):
            if index != 1 or self.step % 2:
                x = layer(x)
        return self.head(x)


def train(mode, precision=None, reshard=True, device="cpu"):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    import peerlane.fsdp

    torch.manual_seed(0)
    model = Unused().to(device)
    policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32) if precision else MixedPrecisionPolicy()
    mesh = dist.device_mesh.init_device_mesh(device, (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    gather = peerlane.fsdp.enable(model, reduce_scatter=mode == "both", **BACKENDS[device]) if mode else None
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    random = torch.Generator().manual_seed(5 + dist.get_rank())
    for _ in range(STEPS):
        x = torch.randn(2, 6, 32, generator=random).to(device)
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, gather and gather.report(), gather and gather.reduce_scatter.report()


def equal_losses(precision, reshard):
    expected, _, _ = train(None, precision, reshard)
    losses, report, _ = train("gather", precision, reshard)
    assert losses == expected and len(set(losses)) == STEPS
    assert report["calls"] >= STEPS * 3 and not report["fallbacks"], report
    group = report["group"]
    assert group["calls_with_copies"] == 0 and group["operations"]["misses"] <= 4, report
    # Once the ranks know how long outputs live, they send no message: neither to use memory again nor to compare places.
    memory = report["memory"]
    assert not memory["is_learning"] and memory["distance"] <= 4 and memory["blocks"] <= 6, report
    assert memory["messages"] <= 68 < report["calls"] and group["memory"]["exchanges"] == 0, report
    return report


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize("reshard", [True, False])
def test_losses_are_equal(precision, reshard):
    peerlane.spawn(with_gloo, 2, equal_losses, precision, reshard)


def equal_losses_with_reductions():
    expected, _, _ = train(None)
    losses, _, report = train("both")
    # Two addends have one sum, in any order.
    assert losses == expected and report["calls"] >= STEPS * 3 and not report["fallbacks"], report


def test_losses_are_equal_with_reductions():
    peerlane.spawn(with_gloo, 2, equal_losses_with_reductions)


def beside_compute():
    from torch.distributed.fsdp import fully_shard

    import peerlane.fsdp

    is_first = dist.get_rank() == 0
    model = torch.nn.Linear(8, 8)
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
    differs = pytest.raises(peerlane.Mismatch, match="beside_compute is false on rank 1, true on rank 0")

    def enabled(**options):
        return peerlane.fsdp.enable(model, reduce_scatter=True, **options)

    def trained():
        model(torch.ones(2, 8)).sum().backward()

    enabled(**({} if is_first else {"beside_compute": False}))
    with differs:
        model.unshard()
    model.reshard()
    hook = enabled(beside_compute=is_first).reduce_scatter
    with differs:
        hook(torch.ones(4), torch.ones(8), dist.group.WORLD, dist.ReduceOp.SUM)

    # It is on by default, and the other calls of the same group have their own setting.
    enabled(**({} if is_first else {"beside_compute": True}))
    trained()
    peerlane.torch.all_reduce(torch.ones(4), beside_compute=None if is_first else False)
    enabled(beside_compute=False)
    trained()
    with pytest.raises(peerlane.InvalidArgument, match="beside_compute is None, expected True or False"):
        enabled(beside_compute=None)


def test_calls_run_beside_compute_by_default():
    peerlane.spawn(with_gloo, 2, beside_compute)


def other_groups():
    from torch.distributed.fsdp import fully_shard

    import peerlane.fsdp

    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = torch.nn.Linear(8, 8)
    fully_shard(model, mesh=mesh)
    gather = peerlane.fsdp.enable(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
    seen = [str(warning.message) for warning in caught if "Peerlane" in str(warning.message) or "own collective" in str(warning.message)]
    assert len(seen) == 1 and "sharded over the ranks" in seen[0], seen
    report = gather.report()
    assert sum(report["fallbacks"].values()) >= 3 and report["calls"] == 0
    # After the first call, such a model takes no part in calls of the group.
    assert report["memory"]["messages"] == 1, report
    gather = peerlane.fsdp.enable(model, mesh["shard"].get_group())
    model(torch.ones(2, 8)).sum().backward()
    assert gather.report()["calls"] >= 1 and not gather.report()["fallbacks"]
    with pytest.raises(peerlane.InvalidArgument, match="has no FSDP2 module"):
        peerlane.fsdp.enable(torch.nn.Linear(1, 1))
    peerlane.torch.close(mesh["shard"].get_group())


def test_other_groups_fall_back_visibly():
    peerlane.spawn(with_gloo, 4, other_groups)


def open_pool(limit=1 << 30):
    from peerlane._pool import Pool

    group = peerlane.torch.group_of(backend="host", timeout=5)
    return group, Pool(group, limit)


def learned(pool, held=2, allocations=80):
    """Allocates until the ranks know that a program holds `held` tensors, which it returns."""
    tensors = []
    for index in range(allocations):
        tensors.append(pool.allocate((100 + index % 3,), torch.float32))
        tensors = tensors[-held:]
    assert not pool.report()["is_learning"], pool.report()
    return tensors


def held_for_longer():
    group, pool = open_pool()
    tensors = learned(pool)
    before = pool.report()
    # A tensor is alive in the allocation after the next one, and one more is spare.
    assert before["distance"] == 4 and before["messages"] < 80, before

    # All ranks hold twice as many from now on.
    values = []
    for value in range(20):
        tensors = [*tensors, pool.allocate((101,), torch.float32)][-4:]
        tensors[-1].fill_(value)
        values = [*values, float(value)][-4:]
        assert [tensor[0].item() for tensor in tensors[-len(values) :]] == values
    after = pool.report()
    assert after["distance"] > before["distance"] and before["messages"] < after["messages"] <= before["messages"] + 3, after
    for _ in range(20):
        tensors = [*tensors, pool.allocate((101,), torch.float32)][-4:]
    assert pool.report()["messages"] == after["messages"]

    # A view holds the memory too, and a circle of references is collected.
    view = tensors[-1][1:3]
    view.fill_(7)
    del tensors
    for _ in range(3):
        circle = [pool.allocate((101,), torch.float32)]
        circle.append(circle)
        circle[0].fill_(1)
        del circle
    assert view.tolist() == [7, 7]
    group.barrier()


def test_memory_that_is_held_for_longer_is_not_given_away():
    peerlane.spawn(with_gloo, 2, held_for_longer)


def held_by_one_rank(group, folder):
    from peerlane._pool import Pool

    pool = Pool(group, 1 << 20)
    tensors = learned(pool)
    try:
        for _ in range(8):
            tensors.append(pool.allocate((100,), torch.float32))
            if group.rank == 0:
                del tensors[:-2]
            group.all_reduce(torch.ones(1))
    except peerlane.Error as error:
        (folder / str(group.rank)).write_text(str(error))
        raise


def test_a_rank_that_holds_memory_for_longer_than_the_others_is_an_error(tmp_path):
    with pytest.raises(peerlane.Error, match="ranks call in different orders"):
        peerlane.spawn(held_by_one_rank, 2, tmp_path, backend="host", timeout=5)
    texts = [(tmp_path / rank).read_text() for rank in "01"]
    assert all('rank 1 in the call "exchange"' in text for text in texts), texts
    assert "this rank holds a tensor of allocation" in texts[1] and "hold it for as long on all ranks" in texts[1], texts


def blocks_serve_shorter_tensors():
    from peerlane._pool import Pool

    group, pool = open_pool(limit=20_000)
    for index in range(200):
        size = (1000, 400, 900)[index % 3] * (index > 0) + 1000 * (index == 0)
        tensor = pool.allocate((size,), torch.float32)
        block = tensor[: size // 2] if dist.get_rank() == 0 else tensor[size // 2 :]
        block.fill_(dist.get_rank() + index)
        peerlane.torch.all_gather_into_tensor(tensor, block, group=group)
        half = size // 2
        assert tensor.tolist() == [index] * half + [index + 1] * half
        del tensor, block
    report = group.report()
    # The tensors of 3600 bytes share the blocks of those of 4000.
    assert pool.report()["bytes"] <= 10_000 and report["calls_with_copies"] == 0, (pool.report(), report)

    # What exceeds the limit is refused on all ranks, and no block that is there is lost.
    assert pool.allocate((5000,), torch.float32) is None
    assert pool.allocate((1000,), torch.float32) is not None

    # Memory that a program takes in inference serves training too.
    pool = Pool(group, 1 << 20)
    with torch.inference_mode():
        for _ in range(3):
            pool.allocate((500,), torch.float64)
    for _ in range(3):
        pool.allocate((500,), torch.float64).requires_grad_().sum().backward()


def test_blocks_serve_shorter_tensors_up_to_a_limit():
    peerlane.spawn(with_gloo, 2, blocks_serve_shorter_tensors)


def limited():
    from torch.distributed.fsdp import fully_shard

    import peerlane.fsdp

    model = torch.nn.Linear(64, 64)
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    gather = peerlane.fsdp.enable(model, memory_limit=100 if dist.get_rank() else 1 << 20)
    with pytest.warns(RuntimeWarning, match="memory_limit"):
        model(torch.ones(2, 64)).sum().backward()
    report = gather.report()
    assert report["calls"] == 0 and sum(report["fallbacks"].values()) >= 1 and report["memory"]["limit"] == 100, report
    with pytest.raises(peerlane.InvalidArgument, match="memory_limit is -1, expected a whole number from 0"):
        peerlane.fsdp.enable(model, memory_limit=-1)


def test_the_smallest_limit_of_all_ranks_counts():
    peerlane.spawn(with_gloo, 2, limited)


@pytest.mark.parametrize(("given", "expected"), [(None, "32"), ("1", "1")])
def test_an_import_asks_for_hardware_queues_unless_the_program_has(tmp_path, given, expected):
    environment = {name: value for name, value in os.environ.items() if name != QUEUES} | ({QUEUES: given} if given else {})
    program = f"import peerlane.torch, os; print(os.environ['{QUEUES}'])"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected

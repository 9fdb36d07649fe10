"""FSDP2 with Peerlane's gathers over gloo on the CPU: losses are bit-equal to PyTorch's default."""

import warnings

import pytest

import peerlane

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from test_torch import with_gloo

STEPS = 20
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
    assert sum(gather.report()["fallbacks"].values()) >= 3 and gather.report()["calls"] == 0
    gather = peerlane.fsdp.enable(model, mesh["shard"].get_group())
    model(torch.ones(2, 8)).sum().backward()
    assert gather.report()["calls"] >= 1 and not gather.report()["fallbacks"]
    with pytest.raises(peerlane.InvalidArgument, match="has no FSDP2 module"):
        peerlane.fsdp.enable(torch.nn.Linear(1, 1))
    peerlane.torch.close(mesh["shard"].get_group())


def test_other_groups_fall_back_visibly():
    peerlane.spawn(with_gloo, 4, other_groups)

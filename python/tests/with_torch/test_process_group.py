"""Process groups of `torch.distributed` with the backend "peerlane", on the CPU: each result is equal to that of Gloo, and programs run unchanged."""

import time
import warnings
from datetime import timedelta

import pytest

import peerlane

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from test_fsdp import Unused
from torch.distributed.device_mesh import init_device_mesh

import peerlane.fsdp
import peerlane.torch


def with_backend(group, backend, options, function, *args):
    """Runs a function with a process group of a backend; the group that `spawn` has opened is not used."""
    torch.set_num_threads(1)
    is_first = group.rank == 0
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if is_first else None
    port = int(group.exchange(str(store.port).encode() if is_first else b"")[0])
    store = store or dist.TCPStore("127.0.0.1", port)
    dist.init_process_group(backend, store=store, rank=group.rank, world_size=group.size, pg_options=options)
    try:
        return plain(function(*args))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def plain(result):
    """Returns a result with lists for tensors, whose memory would end with the process."""
    if isinstance(result, (list, tuple)):
        return [plain(each) for each in result]
    return result.tolist() if isinstance(result, torch.Tensor) else result


def in_ranks(ranks, function, *args, backend="peerlane", options=None):
    """Returns what a function returns on each rank."""
    return peerlane.spawn(with_backend, ranks, backend, options, function, *args)


def random(shape, dtype, seed):
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 50
    return numbers.to(dtype)


def collectives():
    """Makes each call of torch.distributed with random tensors, and returns the outputs. Sums of whole numbers have one result in any order."""
    return [of_type(dtype) for dtype in (torch.float32, torch.int64)]


def of_type(dtype):
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = random((size, 3), torch.int64, rank).to(dtype)
    results = []

    def done(*tensors):
        results.extend(tensor.clone() for tensor in tensors)

    for is_async in (False, True):

        def call(function, *args, is_async=is_async, **options):
            work = function(*args, async_op=is_async, **options)
            assert (work is None) != is_async
            if is_async:
                work.wait()
                assert work.is_completed() or dist.get_backend() == "gloo"

        output = torch.empty(size * size, 3, dtype=dtype)
        call(dist.all_gather_into_tensor, output, whole)
        done(output)
        outputs = [torch.empty(size, 3, dtype=dtype) for _ in range(size)]
        call(dist.all_gather, outputs, whole)
        done(*outputs)
        tensor = whole.clone()
        call(dist.all_reduce, tensor)
        done(tensor)
        for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
            tensor = whole.clone()
            call(dist.all_reduce, tensor, op=op)
            done(tensor)
        tensor = whole.clone()
        call(dist.broadcast, tensor, size - 1)
        done(tensor)
        tensor = whole.clone()
        call(dist.reduce, tensor, size - 1)
        done(*[tensor] * (rank == size - 1))
        output = torch.empty(1, 3, dtype=dtype)
        call(dist.reduce_scatter_tensor, output, whole)
        done(output)
        call(dist.reduce_scatter, output, [part.clone() for part in whole.split(1)])
        done(output)
        output = torch.empty_like(whole)
        call(dist.all_to_all_single, output, whole)
        done(output)
        send, receive = [1 + each for each in range(size)], [1 + rank] * size
        source, output = random((sum(send), 2), dtype, rank), torch.empty(sum(receive), 2, dtype=dtype)
        call(dist.all_to_all_single, output, source, receive, send)
        done(output)
        outputs = [torch.empty(1 + rank, 2, dtype=dtype) for _ in range(size)]
        if dist.get_backend() == "gloo":
            # Gloo has no list of outputs.
            outputs = list(output.split(receive))
        else:
            call(dist.all_to_all, outputs, list(source.split(send)))
        done(*outputs)
        outputs = [torch.empty_like(whole) for _ in range(size)] if rank == 0 else None
        call(dist.gather, whole, outputs, 0)
        done(*outputs or [])
        output = torch.empty_like(whole)
        call(dist.scatter, output, [whole + each for each in range(size)] if rank == 0 else None, 0)
        done(output)
    dist.barrier()
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    said = ["from 0", rank] if rank == 0 else [None, None]
    dist.broadcast_object_list(said, 0)
    results.extend([objects, said])
    if size > 1:
        # Peerlane has no messages between two ranks, so Gloo sends those of the CPU.
        tensor = torch.tensor([float(rank)])
        if rank == 0:
            dist.send(tensor, 1)
        elif rank == 1:
            dist.recv(tensor, 0)
        results.append(tensor)
    return results


@pytest.mark.parametrize("ranks", [1, 3])
def test_collectives_are_those_of_gloo(ranks):
    assert in_ranks(ranks, collectives) == in_ranks(ranks, collectives, backend="gloo")


def functional():
    import torch.distributed._functional_collectives as calls

    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    tensor = random((size, 3), torch.int32, rank)
    results = [
        calls.all_gather_tensor(tensor, 0, group), calls.all_reduce(tensor, "sum", group), calls.reduce_scatter_tensor(tensor, "sum", 0, group),
        calls.all_to_all_single(tensor, None, None, group), calls.broadcast(tensor, 0, group),
        *calls.all_reduce_coalesced([tensor, tensor + 1], "max", group), *calls.all_gather_into_tensor_coalesced([tensor, tensor + 1], group),
        *calls.reduce_scatter_tensor_coalesced([tensor, tensor + 1], "sum", [0, 0], group),
    ]  # fmt: skip
    with dist._coalescing_manager(async_ops=True) as works:
        coalesced = [tensor.clone(), tensor + 5]
        for each in coalesced:
            dist.all_reduce(each)
    works.wait()
    flags = torch.tensor([rank == 0, True, False])
    work = dist.all_reduce(flags, dist.ReduceOp.MAX, async_op=True)
    work.wait()
    assert work.result()[0] is flags or dist.get_backend() == "gloo"
    dist.barrier(async_op=True).wait()
    return [result + 0 for result in [*results, *coalesced, flags]]


def test_functional_collectives_are_those_of_gloo():
    assert in_ranks(2, functional) == in_ranks(2, functional, backend="gloo")


def batch(step):
    random = torch.Generator().manual_seed(7 * step + dist.get_rank())
    return torch.randn(2, 6, 32, generator=random)


def trained(parallel):
    """Trains a model in one of several ways, and returns the losses and the parameters."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = Unused()
    if parallel == "ddp":
        model = DistributedDataParallel(model, find_unused_parameters=True)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in [*model.layers, model]:
            fully_shard(layer, mesh=mesh)
    if parallel == "hooked":
        peerlane.fsdp.enable(model, reduce_scatter=True)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for step in range(5):
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    parameters = [parameter if parallel == "ddp" else parameter.full_tensor() for parameter in model.parameters()]
    return losses, [parameter.detach().clone() for parameter in parameters]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp", "hooked"])
def test_training_is_equal_bit_by_bit(parallel):
    found = in_ranks(2, trained, parallel)
    expected = in_ranks(2, trained, "fsdp" if parallel == "hooked" else parallel, backend="gloo")
    # Two addends have one sum, in any order.
    assert found == expected
    losses, _ = found[0]
    assert len(set(losses)) == len(losses)


class Block(torch.nn.Module):
    """A feed-forward block, of which tensor parallelism shards columns of the first matrix and rows of the second one."""

    def __init__(self, width=16):
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def tensor_parallel(uses_sequence):
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(1)
    model, mesh = Block(), init_device_mesh("cpu", (dist.get_world_size(),))
    x = torch.randn(4, 16)
    expected = model(x)
    expected.sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    layouts = {"input_layouts": Shard(0)} if uses_sequence else {}
    outputs = {"output_layouts": Shard(0)} if uses_sequence else {}
    plan = {"up": ColwiseParallel(**layouts), "down": RowwiseParallel(**outputs)}
    if uses_sequence:
        for parameter in model.up, model.down:
            parallelize_module(parameter, mesh, plan["up"] if parameter is model.up else plan["down"])
        local = DTensor.from_local(x, mesh, [Replicate()]).redistribute(placements=[Shard(0)]).to_local()
        found = DTensor.from_local(local + model.down(torch.relu(model.up(local))), mesh, [Shard(0)]).full_tensor()
        torch.testing.assert_close(found, expected)
        return
    parallelize_module(model, mesh, plan)
    found = model(x)
    found.sum().backward()
    torch.testing.assert_close(found, expected)
    for parameter, gradient in zip(model.parameters(), gradients):
        torch.testing.assert_close(parameter.grad.full_tensor(), gradient)


@pytest.mark.parametrize("uses_sequence", [False, True])
def test_tensor_parallel_is_equal_to_one_rank(uses_sequence):
    in_ranks(2, tensor_parallel, uses_sequence)


class Copied(torch.autograd.Function):
    """The input of a column-parallel layer: its gradients are summed."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class Reduced(torch.autograd.Function):
    """The output of a row-parallel layer, which is a sum."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Gathered(torch.autograd.Function):
    """The input of a column-parallel layer whose tokens are sharded."""

    @staticmethod
    def forward(ctx, x):
        whole = x.new_empty(dist.get_world_size() * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(whole, x.contiguous())
        return whole

    @staticmethod
    def backward(ctx, gradient):
        part = gradient.new_empty(gradient.shape[0] // dist.get_world_size(), *gradient.shape[1:])
        work = dist.reduce_scatter_tensor(part, gradient.contiguous(), async_op=True)
        work.wait()
        return part


class Scattered(torch.autograd.Function):
    """The output of a row-parallel layer whose tokens are sharded."""

    @staticmethod
    def forward(ctx, x):
        part = x.new_empty(x.shape[0] // dist.get_world_size(), *x.shape[1:])
        dist.reduce_scatter_tensor(part, x.contiguous())
        return part

    @staticmethod
    def backward(ctx, gradient):
        return Gathered.apply(gradient)


def megatron():
    """Trains a block as Megatron writes it, with and without sequence parallelism, and a loss over a vocabulary that is sharded."""
    rank, size = dist.get_rank(), dist.get_world_size()
    results = []
    for enter, leave in ((Copied.apply, Reduced.apply), (Gathered.apply, Scattered.apply)):
        torch.manual_seed(rank)
        up, down, head = torch.nn.Linear(16, 64 // size), torch.nn.Linear(64 // size, 16, bias=False), torch.nn.Linear(16, 12 // size)
        parameters = [*up.parameters(), *down.parameters(), *head.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        for step in range(3):
            tokens = 4 if enter is Copied.apply else 4 // size
            x = random((tokens, 16), torch.float32, step if enter is Copied.apply else step + rank) / 50
            x = x + leave(down(torch.relu(up(enter(x)))))
            logits = head(enter(x))
            largest = logits.detach().max(1).values
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            sums = Reduced.apply((logits - largest[:, None]).exp().sum(1))
            loss = (sums.log() - Reduced.apply(logits[:, 0]) / size).mean()
            loss.backward()
            norm = sum((parameter.grad**2).sum() for parameter in parameters)
            dist.all_reduce(norm)
            optimizer.step()
            optimizer.zero_grad()
            results.extend([loss.detach(), norm])
        results.extend(parameter.detach() for parameter in parameters)
    return results


def test_a_block_of_megatron_is_equal_bit_by_bit():
    assert in_ranks(2, megatron) == in_ranks(2, megatron, backend="gloo")


def parts():
    rank = dist.get_rank()
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = halves[rank % 2]
    output = torch.empty(2, dtype=torch.int64)
    dist.all_gather_into_tensor(output, torch.tensor([rank]), group=mine)
    assert output.tolist() == [rank % 2, rank % 2 + 2]
    tensor = torch.tensor([rank])
    dist.broadcast(tensor, src=2 + rank % 2, group=mine)
    assert tensor.item() == 2 + rank % 2
    # The functions of the package use the same group.
    peerlane.torch.all_reduce(tensor, group=mine)
    assert tensor.item() == 2 * (2 + rank % 2) and peerlane.torch.group_of(mine) is mine.group()
    dist.destroy_process_group(mine)
    with pytest.raises(peerlane.InvalidArgument, match="was destroyed, expected one in use"):
        mine.allreduce([tensor])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    tensor = torch.tensor([rank])
    dist.all_reduce(tensor, group=mesh["inner"].get_group())
    assert tensor.item() == [1, 5][rank // 2]


def test_groups_of_some_ranks():
    in_ranks(4, parts)


def shared_with_gloo():
    """The device of the CPU belongs to Gloo, which must then serve it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    objects = [None] * size
    dist.all_gather_object(objects, rank)
    dist.barrier()
    assert tensor.tolist() == [size, size] and objects == list(range(size))
    assert dist.group.WORLD._group is None, "Peerlane has opened a group for a tensor of Gloo"
    with pytest.raises(peerlane.InvalidArgument, match="the tensor is on meta"):
        dist.all_reduce(torch.ones(2, device="meta"))
    group = dist.group.WORLD
    dist.destroy_process_group()
    with pytest.raises(peerlane.InvalidArgument, match="was destroyed, expected one in use"):
        group.barrier()


def test_the_cpu_can_belong_to_gloo():
    in_ranks(2, shared_with_gloo, backend="cpu:gloo,cuda:peerlane")


def again():
    for _ in range(2):
        store = dist.distributed_c10d._get_default_store()
        rank, size = dist.get_rank(), dist.get_world_size()
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [size] * 3
        dist.destroy_process_group()
        dist.init_process_group("peerlane", store=dist.PrefixStore("again", store), rank=rank, world_size=size)


def test_a_process_group_that_is_made_again():
    in_ranks(2, again)


def bad_input():
    rank, size = dist.get_rank(), dist.get_world_size()
    good = torch.zeros(4)
    dist.all_reduce(good)
    with pytest.raises(peerlane.InvalidArgument, match="all_reduce: .*expected a contiguous array"):
        dist.all_reduce(torch.zeros(4, 2)[:, 0])
    with pytest.raises(peerlane.InvalidArgument, match="output has elements of f64, expected f32"):
        dist.all_gather_into_tensor(torch.zeros(4 * size, dtype=torch.float64), good)
    with pytest.raises(peerlane.InvalidArgument, match="the tensor is on meta, expected one of the devices"):
        dist.all_reduce(torch.zeros(3, device="meta"))
    with pytest.raises(peerlane.InvalidArgument, match="expected 1: each rank has one GPU"):
        dist.group.WORLD.allreduce([good, good])
    with pytest.raises(peerlane.InvalidArgument, match="the options are .*as the pg_options"):
        peerlane.torch.group_of(timeout=3)
    if rank == 0:
        with pytest.raises(peerlane.InvalidArgument, match="broadcast: the tensor is on meta"):
            dist.broadcast(torch.zeros(3, device="meta"), 0)
    else:
        # The other rank makes the call, and learns at once why it fails.
        with pytest.raises(peerlane.Aborted, match="rank 0 failed .*the tensor is on meta"):
            dist.broadcast(good, 0)
    dist.all_reduce(good)
    assert good.tolist() == [0] * 4
    with pytest.raises(peerlane.Mismatch, match="ranks disagree: rank . started it with blocks of") as caught:
        dist.all_reduce(torch.zeros(3 + rank))
    # The rank whose start another one has refused is named in the text.
    assert caught.value.rank in (None, 1 - rank)


def test_bad_input_is_an_error():
    in_ranks(2, bad_input)


def with_options():
    assert dist.group.WORLD.group()._native.beside_compute
    peerlane.torch.all_reduce(torch.ones(2))


def test_options_are_those_of_open():
    in_ranks(1, with_options, options={"beside_compute": True})
    with pytest.raises(peerlane.Error, match="pg_options is 3, expected a dictionary of options"):
        in_ranks(1, with_options, options=3)


def missing(group):
    """Rank 1 never makes the first call."""
    is_first = group.rank == 0
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if is_first else None
    port = int(group.exchange(str(store.port).encode() if is_first else b"")[0])
    store = store or dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("peerlane", store=store, rank=group.rank, world_size=group.size, timeout=timedelta(seconds=2))
    if is_first:
        begun = time.monotonic()
        with pytest.raises(peerlane.Timeout, match="rank 1 has not come to open the group within 2") as caught:
            dist.all_reduce(torch.ones(1))
        assert caught.value.rank == 1 and time.monotonic() - begun < 60
    group.barrier()


def test_a_rank_that_does_not_come_is_named():
    peerlane.spawn(missing, 2)


def profiled():
    with torch.profiler.profile() as profile:
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        peerlane.torch.all_gather_into_tensor(torch.empty(2), torch.ones(2))
    names = {event.key for event in profile.key_averages()}
    assert {"peerlane::all_reduce", "peerlane::all_gather_into_tensor"} <= names, names


def test_profiles_name_the_calls():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        in_ranks(1, profiled)

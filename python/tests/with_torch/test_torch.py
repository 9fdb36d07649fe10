"""`peerlane.torch` beside `torch.distributed` over gloo, bit by bit, on the CPU."""

import pytest

import peerlane

pytest.importorskip("torch")

import torch
import torch.distributed as dist
import torch.distributed.tensor

import peerlane.torch

TYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64, torch.uint8]


def with_gloo(group, function, *args):
    """Runs a function with a process group of PyTorch; the group that `spawn` has opened is not used."""
    torch.set_num_threads(1)
    is_first = group.rank == 0
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if is_first else None
    port = int(group.exchange(str(store.port).encode() if is_first else b"")[0])
    store = store or dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=group.rank, world_size=group.size)
    try:
        return function(*args)
    finally:
        peerlane.torch.close()
        dist.destroy_process_group()


def beside_compute():
    rank, size = dist.get_rank(), dist.get_world_size()
    few, many, api = torch.ones(4), torch.ones(4 * size), peerlane.torch
    parts = [torch.empty(4) for _ in range(size)]
    # Of another type, because the operation of the call before it is kept.
    doubles = [torch.empty(4, dtype=torch.float64) for _ in range(size)]
    longer = [torch.empty(4 + each) for each in range(size)]
    calls = [
        lambda **options: api.all_gather_into_tensor(many, few, **options),
        lambda **options: api.all_gather(doubles, doubles[rank].clone(), **options),
        lambda **options: api.all_gather(longer, torch.ones(4 + rank), **options),
        lambda **options: api.broadcast(few, 0, **options),
        lambda **options: api.all_to_all_single(many.clone(), many, **options),
        lambda **options: api.all_to_all_single(many.clone(), many, [4] * size, [4] * size, **options),
        lambda **options: api.gather(few, parts if rank == 0 else None, 0, **options),
        lambda **options: api.scatter(few, parts if rank == 0 else None, 0, **options),
        lambda **options: api.reduce_scatter_tensor(few, many, **options),
        lambda **options: api.reduce_scatter(torch.empty(4 + rank), [torch.ones(4 + each) for each in range(size)], **options),
        lambda **options: api.all_reduce(few, **options),
        lambda **options: api.reduce(few, 0, **options),
    ]
    api.group_of()
    for call in calls:
        with pytest.raises(peerlane.InvalidArgument, match="beside_compute is 1, expected True or False"):
            call(beside_compute=1)
        with pytest.raises(peerlane.Mismatch, match="beside_compute is false on rank 1, true on rank 0"):
            call(beside_compute=rank == 0)
        call(beside_compute=True)
        # By default a call has the setting of the group, where it is off.
        call(**({} if rank == 0 else {"beside_compute": False}))


def test_calls_run_beside_compute_if_they_say_so():
    peerlane.spawn(with_gloo, 2, beside_compute)


def random(shape, dtype, seed):
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 50
    return numbers.to(dtype)


def nan_of_one_rank(dtype):
    """Returns a NaN on rank 0 and the number of the rank from 1 elsewhere, and the number on every rank."""
    rank = dist.get_rank()
    return torch.tensor([float("nan") if rank == 0 else rank + 1, rank + 1], dtype=dtype)


def every_call():
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in TYPES:
        for is_own in (False, True):

            def new(*shape, dtype=dtype, is_own=is_own):
                return peerlane.torch.empty(*shape, dtype=dtype) if is_own else torch.empty(*shape, dtype=dtype)

            source, expected = new(5, 7), torch.empty(5 * size, 7, dtype=dtype)
            source.copy_(random((5, 7), dtype, rank))
            dist.all_gather_into_tensor(expected, source)
            output = new(5 * size, 7)
            assert peerlane.torch.all_gather_into_tensor(output, source) is None
            assert torch.equal(output, expected)
            output = new(5 * size, 7)
            work = peerlane.torch.all_gather_into_tensor(output, source, async_op=True)
            assert work.wait() and work.is_completed() and torch.equal(output, expected)
            parts = [torch.empty(3 + each, 2, dtype=dtype) for each in range(size)]
            peerlane.torch.all_gather(parts, random((3 + rank, 2), dtype, rank))
            assert all(torch.equal(part, random((3 + each, 2), dtype, each)) for each, part in enumerate(parts))
            parts = [torch.empty(4, dtype=dtype) for _ in range(size)]
            work = peerlane.torch.all_gather(parts, random((4,), dtype, rank), async_op=True)
            while not work.is_completed():
                pass
            assert all(torch.equal(part, random((4,), dtype, each)) for each, part in enumerate(parts))
            tensor = new(9)
            tensor.copy_(random((9,), dtype, rank))
            peerlane.torch.broadcast(tensor, src=size - 1)
            assert torch.equal(tensor, random((9,), dtype, size - 1))
            source, output = new(2 * size, 3), new(2 * size, 3)
            source.copy_(random((2 * size, 3), dtype, rank))
            peerlane.torch.all_to_all_single(output, source)
            rows = [random((2 * size, 3), dtype, each)[2 * rank : 2 * rank + 2] for each in range(size)]
            assert torch.equal(output, torch.cat(rows))
            send, receive = [1 + each for each in range(size)], [1 + rank] * size
            output, source = torch.empty(sum(receive), 3, dtype=dtype), random((sum(send), 3), dtype, rank)
            peerlane.torch.all_to_all_single(output, source, receive, send)
            begin = sum(send[:rank])
            rows = [random((sum(send), 3), dtype, each)[begin : begin + send[rank]] for each in range(size)]
            assert torch.equal(output, torch.cat(rows))
            lists = [torch.empty(4, dtype=dtype) for _ in range(size)] if rank == 0 else None
            peerlane.torch.gather(random((4,), dtype, rank), lists, dst=0)
            assert rank != 0 or all(torch.equal(part, random((4,), dtype, each)) for each, part in enumerate(lists))
            output = new(4)
            peerlane.torch.scatter(output, [random((4,), dtype, each) for each in range(size)] if rank == 0 else None, src=0)
            assert torch.equal(output, random((4,), dtype, rank))
            ordered = [random((2 * size,), dtype, each) for each in range(size)]
            total = ordered[0].clone()
            if dtype in (torch.float32, torch.int32, torch.int64):
                for each in ordered[1:]:
                    total += each
                output = new(2)
                peerlane.torch.reduce_scatter_tensor(output, ordered[rank])
                assert torch.equal(output, total[2 * rank : 2 * rank + 2])
                for lens in ([4] * size, [1 + 3 * each for each in range(size)]):
                    lists = [[random((length,), dtype, 10 * each + to) for to, length in enumerate(lens)] for each in range(size)]
                    expected = lists[0][rank].clone()
                    for each in lists[1:]:
                        expected += each[rank]
                    output = torch.empty(lens[rank], dtype=dtype)
                    assert peerlane.torch.reduce_scatter(output, lists[rank]) is None
                    assert torch.equal(output, expected)
                    work = peerlane.torch.reduce_scatter(output.zero_(), lists[rank], async_op=True)
                    assert work.wait() and torch.equal(output, expected)
                tensor = ordered[rank].clone()
                peerlane.torch.all_reduce(tensor)
                assert torch.equal(tensor, total)
                tensor = ordered[rank].clone()
                peerlane.torch.reduce(tensor, dst=0)
                assert rank != 0 or torch.equal(tensor, total)
            largest = ordered[rank].clone()
            peerlane.torch.all_reduce(largest, dist.ReduceOp.MAX)
            assert torch.equal(largest, torch.stack(ordered).max(0).values)
            if dtype.is_floating_point:
                reduced = [nan_of_one_rank(dtype) for _ in range(4)]
                for tensor, op in zip(reduced, (dist.ReduceOp.MAX, dist.ReduceOp.MIN, "max", "min")):
                    peerlane.torch.all_reduce(tensor, op)
                # A NaN wins as in `torch.maximum`, or loses as in `torch.fmax`, unless there is nothing else.
                nan, is_alone = float("nan"), size == 1
                expected = [[nan, size], [nan, 1], [nan if is_alone else size, size], [nan if is_alone else 2, 1]]
                for tensor, values in zip(reduced, expected):
                    assert torch.equal(tensor.nan_to_num(-1), torch.tensor(values, dtype=dtype).nan_to_num(-1))
    flags = torch.tensor([rank == 0, True])
    gathered = torch.empty(2 * size, dtype=torch.bool)
    peerlane.torch.all_gather_into_tensor(gathered, flags)
    assert gathered.tolist() == [each == 0 if bit == 0 else True for each in range(size) for bit in range(2)]
    peerlane.torch.barrier()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_call(ranks):
    peerlane.spawn(with_gloo, ranks, every_call)


def parts():
    rank = dist.get_rank()
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = halves[rank % 2]
    output = torch.empty(2, dtype=torch.int64)
    peerlane.torch.all_gather_into_tensor(output, torch.tensor([rank]), group=mine)
    assert output.tolist() == [rank % 2, rank % 2 + 2]
    tensor = torch.tensor([rank])
    peerlane.torch.broadcast(tensor, src=2 + rank % 2, group=mine)
    assert tensor.item() == 2 + rank % 2
    peerlane.torch.close(mine)


def again():
    """A process group that is made again gets another group."""
    first = peerlane.torch.group_of()
    store = dist.distributed_c10d._get_default_store()
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=size)
    assert peerlane.torch.group_of() is not first
    tensor = torch.ones(3)
    peerlane.torch.all_reduce(tensor)
    assert tensor.tolist() == [size] * 3


def test_a_process_group_that_is_made_again():
    peerlane.spawn(with_gloo, 2, again)


def moves():
    rank, size = dist.get_rank(), dist.get_world_size()

    def random_bytes(rank):
        return torch.randint(0, 256, (24,), dtype=torch.uint8, generator=torch.Generator().manual_seed(rank))

    for dtype in (torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu):
        source = random_bytes(rank).view(dtype)
        output = peerlane.torch.empty(size * source.numel(), dtype=dtype)
        assert output.dtype == dtype
        peerlane.torch.all_gather_into_tensor(output, source)
        assert torch.equal(output.view(torch.uint8), torch.cat([random_bytes(each) for each in range(size)]))
        with pytest.raises(peerlane.InvalidArgument, match="expected an integer, f16, bf16, f32 or f64"):
            peerlane.torch.all_reduce(source)


def test_types_that_only_move_keep_their_bytes():
    peerlane.spawn(with_gloo, 2, moves)


def test_process_groups_of_some_ranks():
    peerlane.spawn(with_gloo, 4, parts)


def bad_input():
    rank, size = dist.get_rank(), dist.get_world_size()
    good = torch.zeros(4)
    with pytest.raises(peerlane.InvalidArgument, match="expected a contiguous array"):
        peerlane.torch.all_gather_into_tensor(torch.zeros(4 * size), torch.zeros(4, 2)[:, 0])
    with pytest.raises(peerlane.InvalidArgument, match="output has elements of f64, expected f32"):
        peerlane.torch.all_gather_into_tensor(torch.zeros(4 * size, dtype=torch.float64), good)
    with pytest.raises(peerlane.InvalidArgument, match='op is PRODUCT, expected SUM, AVG, MAX, MIN, or "max" or "min"'):
        peerlane.torch.all_reduce(good, dist.ReduceOp.PRODUCT)
    with pytest.raises(peerlane.InvalidArgument, match="got a list, expected a tensor"):
        peerlane.torch.all_reduce([1])
    mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
    sharded = torch.distributed.tensor.distribute_tensor(torch.zeros(4 * size), mesh)
    with pytest.raises(peerlane.InvalidArgument, match="use to_local"):
        peerlane.torch.all_gather_into_tensor(torch.zeros(4 * size), sharded)
    with pytest.raises(peerlane.InvalidArgument, match="call resolve_conj"):
        peerlane.torch.all_gather_into_tensor(torch.zeros(size, dtype=torch.complex64), torch.tensor([1 + 2j]).conj())
    with pytest.raises(peerlane.InvalidArgument, match="has the layout"):
        peerlane.torch.all_reduce(torch.zeros(3).to_sparse())
    if rank == 0:
        with pytest.raises(peerlane.InvalidArgument, match="gather_list is None, expected 2 tensors on rank 0"):
            peerlane.torch.gather(good, None, dst=0)
    else:
        # The other rank makes the call, and learns at once why it fails.
        with pytest.raises(peerlane.Aborted, match="rank 0 failed .*gather_list is None"):
            peerlane.torch.gather(good, dst=0)
    with pytest.raises(peerlane.InvalidArgument, match="on the device meta"):
        peerlane.torch.all_reduce(torch.zeros(3, device="meta"))
    # A tensor that is freed while a start is in progress: the future keeps it.
    work = peerlane.torch.all_gather_into_tensor(torch.zeros(4 * size), torch.ones(4), async_op=True)
    import gc

    gc.collect()
    assert work.wait()


def test_bad_input_is_an_error():
    peerlane.spawn(with_gloo, 2, bad_input)


def other_sizes():
    rank = dist.get_rank()
    with pytest.raises(peerlane.Mismatch, match="ranks disagree: rank . started it with blocks of") as caught:
        peerlane.torch.all_reduce(torch.zeros(3 + rank))
    # The rank whose start another one has refused is named in the text.
    assert caught.value.rank in (None, 1 - rank)
    peerlane.torch.group_of().abandon()


def test_sizes_that_differ_are_named():
    peerlane.spawn(with_gloo, 2, other_sizes)

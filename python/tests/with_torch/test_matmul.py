"""Products of matrices whose rows are gathered, and whose products are reduced, beside plain ones."""

import pytest

import peerlane

pytest.importorskip("torch")

import torch

import peerlane.torch

TYPES = [torch.float32, torch.float64, torch.bfloat16]


def device_of(group):
    return torch.device("cpu" if group.device is None else f"cuda:{group.device}")


def numbers(*shape, seed, dtype, device):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).to(device, dtype)


def gathered_products(group, rounds=3):
    torch.set_num_threads(1)
    device = device_of(group)
    for dtype in TYPES:
        for shape, dim in [((6, 8), 0), ((2, 3, 8), 1), ((4, 3, 8), 0), ((1, 8), -2)]:
            for number in range(rounds):
                shards = [numbers(*shape, seed=100 * number + rank, dtype=dtype, device=device) for rank in range(group.size)]
                factors = [numbers(8, width, seed=7 + width, dtype=dtype, device=device) for width in (5, 16)]
                for return_gathered in (True, False):
                    gathered, products = peerlane.torch.all_gather_matmul(
                        shards[group.rank], factors, dim, group, return_A=return_gathered, streams=1 + number, chunks=1 + number
                    )
                    whole = torch.cat(shards, dim)
                    assert (gathered is None) != return_gathered
                    assert gathered is None or torch.equal(gathered, whole)
                    for product, factor in zip(products, factors):
                        # The numbers are small, so every order of additions gives the same.
                        assert product.shape == (*whole.shape[:-1], factor.shape[1])
                        assert torch.equal(product, whole @ factor)


def reduced_products(group, rounds=3):
    torch.set_num_threads(1)
    device, size = device_of(group), group.size
    for dtype in TYPES:
        for shape, dim in [((3 * size, 8), 0), ((2, 2 * size, 8), 1), ((size, 3, 8), 0), ((size, 8), -2)]:
            for number in range(rounds):
                factors = [numbers(*shape, seed=100 * number + rank, dtype=dtype, device=device) for rank in range(size)]
                others = [numbers(8, 16, seed=50 + rank, dtype=dtype, device=device) for rank in range(size)]
                part = peerlane.torch.matmul_reduce_scatter(factors[group.rank], others[group.rank], "sum", dim, group, streams=1 + number)
                total = sum(factor.double() @ other.double() for factor, other in zip(factors, others))
                expected = total.chunk(size, dim)[group.rank].to(dtype)
                assert torch.equal(part, expected), (dtype, shape, dim)


def in_place(group):
    torch.set_num_threads(1)
    gathered = peerlane.torch.empty(group.size * 16, 32, dtype=torch.float32, group=group)
    shard = gathered[group.rank * 16 : (group.rank + 1) * 16]
    for number in range(3):
        shards = [numbers(16, 32, seed=10 * number + rank, dtype=torch.float32, device=gathered.device) for rank in range(group.size)]
        factor = numbers(32, 16, seed=5, dtype=torch.float32, device=gathered.device)
        shard.copy_(shards[group.rank])
        whole, (product,) = peerlane.torch.all_gather_matmul(shard, [factor], 0, group, chunks=2)
        assert whole.data_ptr() == gathered.data_ptr()
        assert torch.equal(whole, torch.cat(shards)) and torch.equal(product, whole @ factor)
        group.barrier()  # the next round overwrites what peers have read


def refused(group):
    a, b = torch.zeros(4, 8), torch.zeros(8, 3)
    api = peerlane.torch
    for call, text in [
        (lambda: api.all_gather_matmul(a[0], [b], 0, group), "the first factor is tensor"),
        (lambda: api.all_gather_matmul(a, b, 0, group), "expected a list of matrices"),
        (lambda: api.all_gather_matmul(a, [b, b.T], 0, group), r"matrix 1 is \(3, 8\), expected 8 rows"),
        (lambda: api.all_gather_matmul(a, [b.double()], 0, group), "matrix 0 has elements of torch.float64"),
        (lambda: api.all_gather_matmul(a, [b], 1, group), "gather_dim is 1, expected a dimension below 1"),
        (lambda: api.all_gather_matmul(a, [b], 0, group, streams=9), "streams is 9, expected a whole number from 1 to 8"),
        (lambda: api.matmul_reduce_scatter(torch.zeros(5, 8), b, "sum", 0, group), "A has 5 rows in dimension 0, expected a multiple of 2"),
        (lambda: api.matmul_reduce_scatter(a, b, "product", 0, group), "op is product"),
    ]:
        with pytest.raises(peerlane.InvalidArgument, match=text):
            call()


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("body", [gathered_products, reduced_products, in_place])
def test_products_are_those_of_the_whole(body, ranks):
    peerlane.spawn(body, ranks)


def test_what_does_not_fit_is_refused():
    peerlane.spawn(refused, 2)

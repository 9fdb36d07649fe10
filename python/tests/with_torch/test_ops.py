"""The ops `torch.ops.peerlane` on the CPU: values, gradients, and programs that `torch.compile` traces as a whole."""

import shutil

import pytest

import peerlane

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from test_process_group import in_ranks, random

import peerlane.torch

COMPILERS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"))]


def values():
    ops, rank, size, name = torch.ops.peerlane, dist.get_rank(), dist.get_world_size(), peerlane.torch.name_of()
    inputs = [random((2 * size, 3), torch.int32, each) for each in range(size)]
    mine, total = inputs[rank], sum(inputs)
    rows = slice(2 * rank, 2 * rank + 2)
    assert torch.equal(ops.all_gather(mine, name), torch.cat(inputs))
    assert torch.equal(ops.all_gather(mine.t(), name), torch.cat([each.t() for each in inputs]))
    assert torch.equal(ops.all_gather(mine[0, 0], name), torch.stack([each[0, 0] for each in inputs]))
    assert torch.equal(ops.reduce_scatter(mine, "sum", name), total[rows])
    assert torch.equal(ops.all_reduce(mine, "max", name), torch.stack(inputs).max(0).values)
    exchanged = torch.cat([each[rows] for each in inputs])
    assert torch.equal(ops.all_to_all(mine, None, None, name), exchanged)
    assert torch.equal(ops.all_to_all(mine, [2] * size, [2] * size, name), exchanged)
    assert torch.equal(ops.broadcast(mine, size - 1, name), inputs[-1])

    gathered = torch.empty(2 * size * size, 3, dtype=torch.int32)
    ops.all_gather_into(gathered, mine, name)
    assert torch.equal(gathered, torch.cat(inputs))
    output = torch.empty(2, 3, dtype=torch.int32)
    ops.reduce_scatter_into(output, mine, "min", name)
    assert torch.equal(output, torch.stack(inputs).min(0).values[rows])
    ops.all_to_all_into(output := torch.empty_like(mine), mine, None, None, name)
    assert torch.equal(output, exchanged)
    ops.all_reduce_(output := mine.clone(), "sum", name)
    assert torch.equal(output, total)
    ops.broadcast_(output := mine.clone(), 0, name)
    assert torch.equal(output, inputs[0])
    with pytest.raises(peerlane.InvalidArgument, match="expected rows for 2 ranks in dimension 0"):
        ops.reduce_scatter(torch.ones(3), "sum", name)
    with pytest.raises(peerlane.InvalidArgument, match="op is middle, expected SUM, AVG, MAX, MIN"):
        ops.all_reduce(torch.ones(2), "middle", name)

    # What PyTorch expects of an op: its schema, the shapes without memory, and its gradient.
    for op, arguments in (
        (ops.all_gather, ()),
        (ops.reduce_scatter, ("sum",)),
        (ops.all_reduce, ("average",)),
        (ops.all_to_all, (None, None)),
    ):
        torch.library.opcheck(op, (torch.randn(2 * size, 3, requires_grad=True), *arguments, name))
    torch.library.opcheck(ops.all_gather_into, (torch.empty(4 * size, 3), torch.ones(4, 3), name))


def gradients():
    """Compares gradients with those of one process that has the inputs of all ranks."""
    ops, rank, size, name = torch.ops.peerlane, dist.get_rank(), dist.get_world_size(), peerlane.torch.name_of()

    def weights(count):
        return [random((count, 3), torch.float64, 10 + each) for each in range(size)]

    def check(op, of_all, rows):
        inputs = [random((2 * size, 3), torch.float64, each).requires_grad_() for each in range(size)]
        sum((output * weight).sum() for output, weight in zip(of_all(inputs), weights(rows))).backward()
        mine = inputs[rank].detach().clone().requires_grad_()
        (op(mine) * weights(rows)[rank]).sum().backward()
        torch.testing.assert_close(mine.grad, inputs[rank].grad)

    def parts(tensor):
        return list(tensor.split(2))

    check(lambda x: ops.all_gather(x, name), lambda xs: [torch.cat(xs)] * size, 2 * size * size)
    check(lambda x: ops.reduce_scatter(x, "sum", name), lambda xs: parts(sum(xs)), 2)
    check(lambda x: ops.reduce_scatter(x, "average", name), lambda xs: parts(sum(xs) / size), 2)
    check(lambda x: ops.all_reduce(x, "sum", name), lambda xs: [sum(xs)] * size, 2 * size)
    check(lambda x: ops.all_to_all(x, None, None, name), lambda xs: [torch.cat([parts(x)[r] for x in xs]) for r in range(size)], 2 * size)
    with pytest.raises(peerlane.InvalidArgument, match="expected sum or average for an input that needs a gradient"):
        ops.all_reduce(torch.ones(2, requires_grad=True), "max", name)


def of_a_group(group):
    """Names groups that no process group has, also the default one of the package."""
    name = peerlane.torch.name_of(group)
    assert peerlane.torch.name_of(group) == name
    total = torch.ops.peerlane.all_reduce(torch.ones(3), "sum", name)
    assert total.tolist() == [group.size] * 3
    peerlane._default = group
    assert peerlane.torch.name_of() == name


def test_groups_without_a_process_group_have_names():
    peerlane.spawn(of_a_group, 2)


def test_values_and_gradients():
    in_ranks(2, values_and_gradients)


def values_and_gradients():
    values()
    gradients()


class Mlp(torch.nn.Module):
    """A feed-forward block whose tokens are sharded between blocks: columns of the first matrix and rows of the second one on each rank."""

    def __init__(self, width, name):
        super().__init__()
        self.up, self.down, self.name = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width, bias=False), name

    def forward(self, x):
        ops = torch.ops.peerlane
        whole = ops.all_gather(x, self.name)
        return x + ops.reduce_scatter(self.down(torch.relu(self.up(whole))), "sum", self.name)


def written(tensor, output):
    """Calls the functions that write to their arguments, and that have the signatures of torch.distributed."""
    peerlane.torch.all_gather_into_tensor(output, tensor * 2)
    peerlane.torch.all_reduce(output, dist.ReduceOp.MAX)
    exchanged, part = torch.empty_like(output), torch.empty_like(tensor)
    peerlane.torch.all_to_all_single(exchanged, output)
    peerlane.torch.all_to_all_single(output, exchanged, [4, 4], [4, 4])
    peerlane.torch.reduce_scatter_tensor(part, output)
    peerlane.torch.broadcast(part, 1)
    return output + 1, part


def compiled(compiler):
    rank, size, name = dist.get_rank(), dist.get_world_size(), peerlane.torch.name_of()
    torch.manual_seed(rank)
    model, x = Mlp(8, name), random((4, 8), torch.float32, 20 + rank)
    results = []
    for function in (model, torch.compile(model, fullgraph=True, backend=compiler)):
        model.zero_grad()
        output = function(x)
        output.square().mean().backward()
        results.append([output.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
    if compiler == "inductor":
        for a, b in zip(*results):
            torch.testing.assert_close(a, b)
    else:
        assert all(torch.equal(a, b) for a, b in zip(*results))

    expected = written(x, torch.empty(4 * size, 8))
    found = torch.compile(written, fullgraph=True, backend=compiler)(x, torch.empty(4 * size, 8))
    assert all(torch.equal(a, b) for a, b in zip(found, expected))
    with pytest.raises(Exception, match="async_op is True, expected False in a function"):
        torch.compile(lambda x: peerlane.torch.all_reduce(x, async_op=True), fullgraph=True, backend=compiler)(x)


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("backend", ["peerlane", "gloo"])
def test_a_program_is_compiled_as_a_whole(compiler, backend):
    in_ranks(2, compiled, compiler, backend=backend)

"""Functional collectives: values, when they are waited for, groups, and gradients of any order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import dure as dist
from dure.comm import functional as F
from dure.comm.world import new_world
from dure.errors import NotInGroupError, PeerLost, ShapeError, UsageError
from dure.nn import functional as nnF
from dure.testing import run_ranks
from waiting import PATIENCE_S

Pending = F.AsyncCollectiveTensor


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_all_reduce_returns_a_new_tensor(n):
    def body(rank):
        x = torch.tensor([1.0, rank])
        y = F.all_reduce(x, "sum")
        assert F.all_reduce(x, "max").tolist() == [1, n - 1]
        assert F.all_reduce(x, "avg").tolist() == [1, (n - 1) / 2]
        assert F.all_reduce(x, dist.ReduceOp.premul_sum(2.0))[0] == 2 * n
        return y.tolist(), x.tolist()

    total = n * (n - 1) / 2
    assert run_ranks(n, body) == [([n, total], [1, r]) for r in range(n)]


def test_broadcast_takes_a_rank_of_the_group():
    def body(rank):
        group = dist.new_group([1, 2])
        if rank == 0:
            return None
        x = torch.tensor([float(rank)])
        return F.broadcast(x, 1, group).item(), x.item()

    assert run_ranks(3, body) == [None, (2.0, 1.0), (2.0, 2.0)]


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_all_gather_tensor_joins_along_a_dim(n, dim):
    def body(rank):
        part = torch.arange(6).reshape(2, 3) + 10 * rank
        parts = [torch.arange(6).reshape(2, 3) + 10 * r for r in range(n)]
        got = F.all_gather_tensor(part, dim)
        assert got.is_contiguous()
        assert torch.equal(got, torch.cat(parts, dim))
        return F.all_gather_tensor(torch.tensor(rank), 0).tolist()

    assert run_ranks(n, body) == [list(range(n))] * n


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_reduce_scatter_tensor_divides_a_dim(n, dim):
    def body(rank):
        shape = [2, 4]
        shape[dim] *= n
        x = torch.arange(8.0 * n).reshape(shape)
        y = F.reduce_scatter_tensor(x, "sum", dim)
        assert torch.equal(y, n * x.chunk(n, dim)[rank])
        average = F.reduce_scatter_tensor(x, dist.ReduceOp.AVG, dim)
        assert torch.equal(average, x.chunk(n, dim)[rank])

    run_ranks(n, body)


def test_all_to_all_single_with_uneven_parts():
    def body(rank):
        gives = [rank + 1, 2] if rank == 0 else [2, 0]
        takes = [1, 2] if rank == 0 else [2, 0]
        x = torch.arange(float(sum(gives))).unsqueeze(1) + 10 * rank
        return F.all_to_all_single(x, takes, gives).squeeze(1).tolist()

    assert run_ranks(2, body) == [[0.0, 10.0, 11.0], [1.0, 2.0]]


def test_permute_tensor_sends_around_a_ring():
    def body(rank):
        x = torch.full((2, 2), rank)
        ring = F.permute_tensor(x, [1, 2, 0])
        some = F.wait_tensor(F.permute_tensor(x, [1, -1, -1]))
        return ring.tolist(), tuple(some.shape)

    one = [[[r, r], [r, r]] for r in range(3)]
    assert run_ranks(3, body) == [(one[2], (0, 2)), (one[0], (2, 2)), (one[1], (0, 2))]


def test_nn_functional_values_by_hand():
    def body(rank):
        x = torch.tensor([1.0 + rank])
        outs = [torch.zeros(1), torch.zeros(1)]
        sent = [torch.tensor([10.0 * rank]), torch.tensor([10.0 * rank + 1])]
        filled = torch.zeros(1)
        single = torch.zeros(2)
        assert nnF.all_to_all(outs, sent)[1] == outs[1] == 10 + rank
        assert nnF.reduce_scatter(filled, sent) == filled == 10 + 2 * rank
        assert torch.equal(nnF.all_to_all_single(single, torch.cat(sent)), torch.cat(outs))
        assert torch.equal(single, torch.cat(outs))
        return [
            nnF.all_reduce(x).item(),
            nnF.broadcast(x, 1).item(),
            nnF.reduce(x, 1).item(),
            [t.item() for t in nnF.gather(x, 1)],
            nnF.scatter([x, 5 * x], 1).item(),
            [t.item() for t in nnF.all_gather(x)],
            x.item(),
        ]

    assert run_ranks(2, body) == [
        [3.0, 2.0, 0.0, [0.0, 0.0], 2.0, [1.0, 2.0], 1.0],
        [3.0, 2.0, 3.0, [1.0, 2.0], 10.0, [1.0, 2.0], 2.0],
    ]


# ---- waiting -------------------------------------------------------------------------------------


def _late(rank: int, event: threading.Event, use: Callable[[torch.Tensor], Any]) -> Any:
    """Rank 0 calls, looks at everything but values, lets rank 1 call, and then uses the result."""
    if rank == 1:
        assert event.wait(PATIENCE_S)
    y = F.all_reduce(torch.ones(2, 2, requires_grad=True), "sum")
    if rank == 0:
        assert type(y) is Pending
        assert (y.shape, y.dtype, y.dim(), y.numel()) == ((2, 2), torch.float32, 2, 4)
        assert y.requires_grad
        assert y.grad_fn is not None
        assert y.is_contiguous()
        assert hash(y) == id(y)
        assert type(y) is Pending
        event.set()
    return use(y)


@pytest.mark.parametrize(
    "use",
    [
        lambda y: (y + 1)[0, 0].item() - 1,
        lambda y: torch.stack([y, y])[1, 1, 1].item(),
        lambda y: torch.cat(tensors=[y, y])[0, 1].item(),
        lambda y: y.tolist()[1][0],
        lambda y: y.detach().numpy()[0, 0].item(),
        lambda y: float(str(y)[9]),
        lambda y: y.view(4)[3].item(),
        lambda y: y.detach().add_(0)[0, 0].item(),
        lambda y: torch.frombuffer(bytearray(y.detach().numpy().tobytes()), dtype=y.dtype)[
            0
        ].item(),
        lambda y: F.wait_tensor(y)[0, 0].item(),
        lambda y: y[0, 0].item(),
    ],
)
def test_result_is_waited_for_at_its_first_use_and_is_ordinary_then(use):
    event = threading.Event()
    kept = []

    def body(rank):
        return _late(rank, event, lambda y: (kept.append(y), use(y))[1])

    assert run_ranks(2, body) == [2.0, 2.0]
    assert [type(y) for y in kept] == [torch.Tensor] * 2


def test_result_is_waited_for_inside_another_collective():
    def body(rank):
        y = F.all_reduce(F.all_reduce(torch.ones(3), "sum"), "sum")
        dist.all_reduce(y)
        return y.tolist()

    assert run_ranks(2, body) == [[8.0] * 3] * 2


@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_memory_of_a_dropped_result_is_not_given_away(backend):
    came, went = threading.Event(), threading.Event()

    def body(rank):
        if rank == 1:
            assert came.wait(PATIENCE_S)
        F.all_reduce(torch.full((1000,), 3.0), "sum")  # and nobody looks
        if rank == 0:
            others = [torch.full((1000,), 7.0) for _ in range(50)]
            came.set()
            assert went.wait(PATIENCE_S)
            dist.barrier()
            return {t.item() for o in others for t in (o.min(), o.max())}
        went.set()
        dist.barrier()
        return {7.0}

    assert run_ranks(2, body, backend=backend) == [{7.0}] * 2


def test_error_is_raised_where_the_result_is_used_and_again():
    called, gone = threading.Event(), threading.Event()

    def body(rank):
        if rank == 1:
            assert called.wait(PATIENCE_S)
            dist.destroy_process_group()
            gone.set()
            return
        y = F.all_reduce(torch.ones(2), "sum")
        called.set()
        assert gone.wait(PATIENCE_S)
        for _ in range(2):
            with pytest.raises(PeerLost) as caught:
                torch.add(y, 1)
            assert caught.value.peer == 1

    run_ranks(2, body)


# ---- groups --------------------------------------------------------------------------------------


class Mesh:
    """What a mesh is to a collective: two axes of two ranks."""

    def __init__(self) -> None:
        rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        rank = dist.get_rank()
        self.groups = {0: columns[rank % 2], 1: rows[rank // 2]}

    def get_group(self, mesh_dim: int | str | None = None):
        if mesh_dim is None:
            raise UsageError("which axis?")
        return self.groups[{"dp": 0, "tp": 1, 0: 0, 1: 1}[mesh_dim]]


def test_group_may_be_ranks_a_name_or_an_axis_of_a_mesh():
    def body(rank):
        mesh = Mesh()
        x = torch.tensor([2.0**rank])
        ranks = [0, 1] if rank < 2 else [2, 3]
        with pytest.raises(UsageError):
            F.all_reduce(x, "sum", mesh)
        with pytest.raises(UsageError):
            F.all_reduce(x, "sum", [0, 3])
        with pytest.raises(NotInGroupError):
            F.all_reduce(x, "sum", dist.GroupMember.NON_GROUP_MEMBER)
        return [
            F.all_reduce(x, "sum", (mesh, 0)).item(),
            F.all_reduce(x, "sum", (mesh, "tp")).item(),
            F.all_reduce(x, "sum", ranks).item(),
            F.all_reduce(x, "sum", (0, 1, 2, 3)).item(),
            nnF.all_reduce(x, group=mesh.groups[0].group_name).item(),
        ]

    assert run_ranks(4, body) == [
        [5, 3, 3, 15, 5],
        [10, 3, 3, 15, 10],
        [5, 12, 12, 15, 5],
        [10, 12, 12, 15, 10],
    ]


def test_backward_in_another_world_uses_the_group_of_the_call():
    def body(rank):
        x = torch.tensor([1.0], requires_grad=True)
        group = dist.new_group([0, 1])
        y = F.all_reduce(x * x, "sum", group)
        with new_world():
            y.backward()
        assert x.grad is not None
        return x.grad.item()

    assert run_ranks(2, body) == [4.0, 4.0]


def test_misuse_is_refused():
    def body(rank):
        with pytest.raises(ShapeError):
            F.reduce_scatter_tensor(torch.ones(3), "sum", 0)
        with pytest.raises(ShapeError):
            F.all_gather_tensor(torch.ones(3), 1)
        with pytest.raises(UsageError):
            F.all_to_all_single(torch.ones(2), [1, 1], None)
        with pytest.raises(UsageError):
            F.permute_tensor(torch.ones(2), [0, 0])
        with pytest.raises(ShapeError):
            nnF.scatter([torch.ones(2), torch.ones(3)])
        x = torch.ones(2, requires_grad=True)
        with pytest.raises(UsageError, match="gradient"):
            F.all_reduce(x, "max").sum().backward()

    run_ranks(2, body)


# ---- gradients -----------------------------------------------------------------------------------

# Each is linear in x, which is [2, 2] on each of 2 ranks.
MAPS: dict[str, Callable[[int, torch.Tensor], Sequence[torch.Tensor]]] = {
    "all_reduce": lambda r, x: [F.all_reduce(x, "sum")],
    "all_reduce_avg": lambda r, x: [F.all_reduce(x, "avg")],
    "all_reduce_premul": lambda r, x: [F.all_reduce(x, dist.ReduceOp.premul_sum(r + 2.0))],
    "broadcast": lambda r, x: [F.broadcast(x, 1)],
    "all_gather_0": lambda r, x: [F.all_gather_tensor(x, 0)],
    "all_gather_1": lambda r, x: [F.all_gather_tensor(x, 1)],
    "reduce_scatter_0": lambda r, x: [F.reduce_scatter_tensor(x, "sum", 0)],
    "reduce_scatter_1": lambda r, x: [F.reduce_scatter_tensor(x.T, "avg", 1)],
    "all_to_all": lambda r, x: [F.all_to_all_single(x, None, None)],
    "all_to_all_uneven": lambda r, x: [
        F.all_to_all_single(x, *(((0, 1), (0, 2)), ((2, 1), (1, 1)))[r])
    ],
    "permute": lambda r, x: [F.permute_tensor(x, [1, 0])],
    "nn_all_reduce": lambda r, x: [nnF.all_reduce(x)],
    "nn_broadcast": lambda r, x: [nnF.broadcast(x, 1)],
    "nn_reduce": lambda r, x: [nnF.reduce(x, 1)],
    "nn_reduce_avg": lambda r, x: [nnF.reduce(x, 0, dist.ReduceOp.AVG)],
    "nn_gather": lambda r, x: nnF.gather(x, 1),
    "nn_scatter": lambda r, x: [nnF.scatter(x.unbind(0), 1)],
    "nn_all_gather": lambda r, x: nnF.all_gather(x),
    "nn_reduce_scatter": lambda r, x: [nnF.reduce_scatter(x.new_empty(1), [x[0, :1], x[1, :1]])],
    "nn_all_to_all": lambda r, x: nnF.all_to_all(
        [x.new_empty(1), x.new_empty(1 + r)], [x[0, :1], x[1, : 1 + r]]
    ),
    "nn_all_to_all_single": lambda r, x: [
        nnF.all_to_all_single(x.new_empty(2, 2), x, [1, 1], [1, 1])
    ],
}


def _dot(xs: Sequence[torch.Tensor], ys: Sequence[torch.Tensor]) -> float:
    return sum((x * y).sum().item() for x, y in zip(xs, ys, strict=True))


@pytest.mark.parametrize("name", MAPS)
def test_gradients_of_first_and_second_order(name):
    """Over all ranks y = A x; so the gradient g of the sum of w y is A' w, and w y = x g.

    The gradient of the sum of u g by w is A u: what the map makes of u. All numbers are exact.
    """

    def body(rank):
        generator = torch.Generator().manual_seed(rank)

        def draw(like: torch.Tensor) -> torch.Tensor:
            return torch.randint(-99, 99, like.shape, generator=generator).double()

        x = draw(torch.empty(2, 2)).requires_grad_()
        ys = MAPS[name](rank, x)
        ws = [draw(y).requires_grad_() for y in ys]
        (g,) = torch.autograd.grad(ys, x, ws, create_graph=True)
        u = draw(x)
        seconds = torch.autograd.grad(g, ws, u)
        assert all(map(torch.equal, seconds, MAPS[name](rank, u)))
        return _dot(ys, ws), _dot([x], [g])

    forward, backward = zip(*run_ranks(2, body), strict=True)
    assert sum(forward) == sum(backward) != 0


# ---- torch.compile -------------------------------------------------------------------------------


@pytest.fixture
def compiler():
    """Begin with a compiler that knows nothing, and leave it so: it counts for the process."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


# The compiler hides this warning of its own, with a filter that is not each thread's own.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_programs_take_them_between_graphs(compiler):
    def program(x, w):
        y = F.all_reduce(x * w, "sum")
        a, b = nnF.all_gather(y + 1)
        return (a * b).sum()

    compiled = torch.compile(program, backend="aot_eager")

    def body(rank):
        found = []
        for run in (program, compiled):
            x = torch.tensor([1.0, 2.0]) + rank
            w = torch.tensor([3.0, 4.0], requires_grad=True)
            loss = run(x, w)
            loss.backward()
            assert w.grad is not None
            found.append((loss.item(), w.grad.tolist()))
        assert found[0] == found[1]
        return found[1]

    # y = [9, 20] and a = b = y + 1 = [10, 21]. Each rank's loss gives a and b the gradient
    # [10, 21]; rank 0 gets those of a from both ranks, rank 1 those of b: [20, 42]; all_reduce adds
    # the two, and w's gradient is x times that.
    assert run_ranks(2, body) == [
        (541.0, [40.0, 168.0]),
        (541.0, [80.0, 252.0]),
    ]


def test_compiled_function_takes_a_pending_tensor(compiler):
    compiled = torch.compile(lambda y: y * 2 + 1, backend="aot_eager")

    def body(rank):
        return compiled(F.all_reduce(torch.ones(2), "sum")).tolist()

    assert run_ranks(2, body) == [[5.0, 5.0]] * 2

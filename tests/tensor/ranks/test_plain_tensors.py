"""Plain tensors beside DTensors: which are refused, and which are taken as replicated."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from dure.errors import UsageError
from dure.mesh import DeviceMesh
from dure.tensor import Replicate, Shard
from dure.tensor.experimental import implicit_replication
from tests.tensor.ranks.parts import made
from tests.thread_ranks import on_mesh

aten = torch.ops.aten
ONES = torch.ones(4, dtype=torch.int64)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: torch.add(x, ONES),
        lambda x: next(map(torch.add, [x], iter([ONES * 1]))),
        lambda x: aten.add.Tensor(x, torch.ones(4, dtype=torch.int64)),
        lambda x: torch.cat([x, torch.ones(4, dtype=torch.int64)]),
        lambda x: x[torch.tensor([0, 2])],
        lambda x: x + torch.full((4,), float("-inf")),
    ],
    ids=["named", "held by no variable", "overload", "list", "index", "mask"],
)
@on_mesh(2)
def test_a_plain_tensor_of_the_program_is_refused_whoever_holds_it(mesh, use):
    with pytest.raises(UsageError) as caught:
        use(made(mesh, torch.arange(4), [Shard(0)]))
    assert caught.type is UsageError


ATTENTION = torch.arange(64.0).sin().reshape(2, 2, 4, 4)


@pytest.fixture
def composite_attention():
    """Without the CPU's own kernel, which needs no mask. Not within ranks: the switch is global."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


@pytest.mark.usefixtures("composite_attention")
@pytest.mark.parametrize(
    "use",
    [
        lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
        lambda x: x.quantile(0.3, dim=1),
    ],
    ids=["causal mask", "quantile"],
)
@on_mesh(2)
def test_a_plain_tensor_that_an_operator_creates_is_refused_with_what_to_write(mesh, use):
    x = made(mesh, ATTENTION, [Shard(0)])
    with pytest.raises(UsageError) as caught:
        use(x)
    assert "implicit_replication" in caught.value.fix and "attn_mask" not in caught.value.fix
    with implicit_replication():
        found = use(x)
    torch.testing.assert_close(found.full_tensor(), use(ATTENTION))


@on_mesh(2)
def test_lists_of_numbers_are_an_index_that_all_ranks_have(mesh):
    full = torch.arange(12.0).reshape(4, 3)
    for placement in (Replicate(), Shard(0), Shard(1)):
        x = made(mesh, full, [placement])
        assert x[[0, 2]].full_tensor().tolist() == [[0, 1, 2], [6, 7, 8]]
        assert x[:, [2, 0]].full_tensor().tolist() == [[2, 0], [5, 3], [8, 6], [11, 9]]
        assert x[[1, 3], [0, 2]].full_tensor().tolist() == [3, 11]
        assert x[[[0], [3]], [[1, 2]]].full_tensor().tolist() == [[1, 2], [10, 11]]
        assert x[:, range(2)].full_tensor().tolist() == [[0, 1], [3, 4], [6, 7], [9, 10]]
        assert x[[]].full_tensor().tolist() == []
    x = made(mesh, full, [Replicate()])
    assert x[[True, False, False, True]].full_tensor().tolist() == [[0, 1, 2], [9, 10, 11]]


class _Cell(NamedTuple):
    row: Any
    column: Any


INDICES = [
    0, -1, None, ..., True, slice(1, 3), (), (2, 1), (..., 0), (None, 1),
    [1, 3], [], [True, False, False, True], ([0, 2], slice(1, 3)), (1, [0, 2]), ([1, 3], [0, 2]),
    range(2), (slice(None), range(2)), np.int64(1), np.array(1),
    torch.tensor(1), torch.tensor([0, 2]), torch.tensor([True, False, False, True]),
    _Cell(0, 1), _Cell(slice(0, 2), [0, 1]), torch.Size([1, 2]),
]  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=repr)
@on_mesh(2)
def test_what_is_written_by_an_index_is_what_it_selects(mesh, index):
    full = torch.arange(12.0).reshape(4, 3)
    expected, x = full.clone(), made(mesh, full, [Replicate()])
    expected[index] = 20.0
    x[placed_index(mesh, index)] = 20.0
    assert x.full_tensor().tolist() == expected.tolist()
    assert (x[placed_index(mesh, index)].full_tensor() == 20).all()


def placed_index(mesh: DeviceMesh, index: Any) -> Any:
    """Return an index with a replicated tensor in the place of a plain one."""
    return made(mesh, index, [Replicate()]) if isinstance(index, torch.Tensor) else index


# ---- in backward ---------------------------------------------------------------------------------


@on_mesh(2)
def test_a_gradient_that_the_program_passes_is_the_full_one(mesh):
    x = made(mesh, torch.arange(4.0).reshape(2, 2), [Shard(0)]).requires_grad_()
    weight = made(mesh, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), [Replicate()])
    (grad,) = torch.autograd.grad(x @ weight, x, torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    assert grad.full_tensor().tolist() == [[1, 3], [2, 4]]


class _Adds(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] + torch.ones(4)


@pytest.mark.parametrize("where", ["hook", "function"])
@on_mesh(2)
def test_hooks_and_functions_in_backward_are_the_program(mesh, where):
    x = made(mesh, torch.arange(4.0), [Shard(0)]).requires_grad_()
    y = x * 2
    if where == "hook":
        y.register_hook(lambda grad: grad + torch.ones(4))
    loss = (_Adds.apply(y) if where == "function" else y).sum()  # pyright: ignore
    with pytest.raises(UsageError, match="got a plain tensor"):
        loss.backward()

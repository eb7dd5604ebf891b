"""Functional collectives in compiled programs."""

from __future__ import annotations

import pytest
import torch

from dure.comm import functional as F
from dure.nn import functional as nnF
from dure.testing import run_ranks


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

"""How code finds its world: threads of a program, thread-ranks, and autograd's threads."""

from __future__ import annotations

import threading

import pytest
import torch

import dure as dist
from dure.comm.aliases import _resolve_process_group
from dure.comm.operators import group_named
from dure.comm.world import current_world, new_world
from dure.errors import UsageError
from dure.testing import run_ranks


def test_a_thread_that_a_program_starts_sees_the_process_world():
    seen = []
    with dist.process_group("threads", store=dist.HashStore(), rank=0, world_size=1):
        thread = threading.Thread(target=lambda: seen.append(dist.get_world_size()))
        thread.start()
        thread.join()
    assert seen == [1]


def test_a_thread_rank_sees_only_its_own_world():
    with dist.process_group("threads", store=dist.HashStore(), rank=0, world_size=1):

        def body(rank):
            return dist.get_rank(), dist.get_world_size()

        assert run_ranks(3, body) == [(r, 3) for r in range(3)]
        assert dist.get_world_size() == 1


def test_new_world_is_empty_and_ends_with_its_block():
    outside = current_world()
    with new_world() as inside:
        assert current_world() is inside
        assert not dist.is_initialized()
        with pytest.raises(UsageError):
            dist.get_rank()
    assert current_world() is outside


def test_what_is_called_during_backward_keeps_its_own_group():
    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group):
            ctx.group = group
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            grad = grad.clone()
            ctx.group.all_reduce(grad)
            return grad, None

    def body(rank):
        x = torch.full((3,), float(rank), requires_grad=True)
        Sum.apply(x, dist.group.WORLD).sum().backward()
        assert x.grad is not None
        return x.grad.tolist()

    assert run_ranks(4, body) == [[4.0] * 3] * 4


def test_groups_are_found_by_name_and_the_default_one_as_0():
    def body(rank):
        default, other = dist.group.WORLD, dist.new_group([0])
        for name in ("0", default.group_name):
            assert _resolve_process_group(name) is default
        assert _resolve_process_group(other.group_name) is other
        with pytest.raises(UsageError):
            _resolve_process_group("nosuch")
        assert group_named("0", "all_reduce") is default

    run_ranks(1, body)

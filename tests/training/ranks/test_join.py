"""`Join` with joinables of every kind: a program's own, the sharded optimizer, several together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure.errors import PerformanceWarning, UsageError
from dure.testing import run_ranks
from dure.training import join
from tests.parallel.ddp.join_models import (
    Params,
    assert_all_close,
    batches_of,
    loss_of,
    make_net,
    train_alone,
)
from tests.parallel.optim.zero_models import KINDS


class Adder(dist.Joinable):
    """Adds ones over the ranks."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.group = group or dist.group.WORLD
        self.sums: list[float] = []
        self.shadowed: list[float] = []
        self.was_last: bool | None = None

    def add(self) -> None:
        dist.Join.notify_join_context(self)
        self.sums.append(self._sum(1.0))

    def _sum(self, mine: float) -> float:
        tensor = torch.full((2,), mine)
        dist.all_reduce(tensor, group=self.group)
        return tensor[0].item()

    def join_hook(self, **kwargs: Any) -> dist.JoinHook:
        adder, self.kwargs = self, kwargs

        class Hook(dist.JoinHook):
            def main_hook(self) -> None:
                dist.Join.notify_join_context(adder)  # says nothing on a rank that shadows
                adder.shadowed.append(adder._sum(0.0))

            def post_hook(self, is_last_joiner: bool) -> None:
                adder.was_last = is_last_joiner

        return Hook()

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        assert self.group is not None
        return self.group


def test_each_joinable_is_shadowed_when_it_communicates_3_ranks():
    counts = (4, 1, 4)

    def rank_main(rank: int) -> tuple[list[float], list[float], int, int, bool | None]:
        often, rarely = Adder(), Adder()
        with dist.Join([often, rarely], word=1):
            for step in range(counts[rank]):
                often.add()
                if step % 2:
                    rarely.add()
        assert often.kwargs == {"word": 1}
        often.add()  # outside: no announcement
        return (often.sums, often.shadowed, len(rarely.sums), len(rarely.shadowed), often.was_last)

    first, second, third = run_ranks(3, rank_main)
    assert first == third == ([3.0, 2.0, 2.0, 2.0, 3.0], [], 2, 0, True)
    assert second == ([3.0, 3.0], [2.0, 2.0, 2.0], 0, 2, False)


def test_a_rank_that_shadows_very_often_is_warned_once(monkeypatch):
    monkeypatch.setattr(join, "_MANY_ROUNDS", 3)

    def rank_main(rank: int) -> None:
        adder = Adder()
        with dist.Join([adder]):
            for _ in range(7 * rank):
                adder.add()

    with pytest.warns(PerformanceWarning, match="rank 0 has shadowed the others 3 times") as found:
        run_ranks(2, rank_main)
    assert len(found) == 1


@pytest.mark.parametrize(
    ("counts", "kind"),
    [((1, 3, 2), "straight"), ((0, 1, 3), "buckets"), ((1, 3, 2), "shared")],
)
def test_ddp_and_the_sharded_optimizer_train_as_one_process_does_3_ranks(counts, kind):
    def rank_main(rank: int) -> Params:
        ddp = dist.DistributedDataParallel(make_net(), bucket_cap_mb=1e-4)
        optimizer = dist.ZeroRedundancyOptimizer(
            ddp.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, **KINDS[kind]
        )
        for epoch in range(2):
            with dist.Join([ddp, optimizer]):
                for x in batches_of(rank, counts[rank], epoch):
                    optimizer.zero_grad()
                    loss_of(ddp(x)).backward()
                    optimizer.step()
        dist.barrier()
        return [p.detach().clone() for p in ddp.parameters()]

    assert_all_close(run_ranks(3, rank_main), train_alone(counts, True, 2))


def test_contexts_that_make_no_sense_are_refused_2_ranks():
    def rank_main(rank: int) -> None:
        adder = Adder()
        for wrong in ([], [adder, nn.Linear(1, 1)], [adder, Adder(dist.new_group([0, 1]))]):
            with pytest.raises(UsageError):
                dist.Join(wrong)
        with dist.Join([adder]), pytest.raises(UsageError), dist.Join([adder]):
            pytest.fail("entered")

    run_ranks(2, rank_main)

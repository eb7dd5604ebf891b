"""What travels between the stages of a pipeline: structures, dtypes, and shapes that change."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import dure.pipelining as pp
from dure.parallel.pipeline.messages import Messages
from dure.testing import run_ranks
from tests.parallel.pipeline.ranks.pipeline_models import (
    CPU,
    LENGTHS,
    OTHER,
    SCHEDULES,
    STEADY,
    Nested,
    batches,
    dense,
    mse,
    of_lengths,
    of_nested,
    one_process,
    verify_same,
)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v"])
def test_structures_dtypes_and_skips_travel_on_2_ranks(name: str):
    num = 2 * SCHEDULES[name][1]
    torch.manual_seed(1)
    parts = [Nested(i, num) for i in range(num)]
    found = run_ranks(2, of_nested, name, 2, parts, eager_bytes=0)
    verify_same(found, one_process(parts, batches(2), 4))


def test_shapes_may_change_from_microbatch_to_microbatch_on_2_ranks():
    parts = dense(2)
    _, found = run_ranks(2, of_lengths, parts, LENGTHS, eager_bytes=0)
    for lengths, losses in zip(LENGTHS, found, strict=True):
        generator = torch.Generator().manual_seed(sum(lengths))
        data = [torch.randn(n, 6, generator=generator).double() for n in lengths]
        expected = [mse(nn.Sequential(*parts)(x), x.sin()).item() for x in data]
        torch.testing.assert_close(losses, expected, rtol=0, atol=1e-12, equal_nan=True)


def test_receives_are_posted_ahead_only_if_shapes_are_steady(
    monkeypatch: pytest.MonkeyPatch,
):
    """Either way a header and a tensor are sent, and no filler."""
    sent: list[tuple[int, ...]] = []
    posted: list[int] = []
    send, post = Messages._send, Messages.post

    def counted(self: Any, tensor: torch.Tensor, *args: Any) -> None:
        sent.append(tuple(tensor.shape))
        send(self, tensor, *args)

    def watched(self: Any, transfer: Any) -> None:
        post(self, transfer)
        posted.append(len(self._posted[transfer].room))

    monkeypatch.setattr(Messages, "_send", counted)
    monkeypatch.setattr(Messages, "post", watched)
    parts = dense(2)
    for steps, expected in (([STEADY] * 4, 1), ([STEADY, OTHER] * 2, 0)):
        run_ranks(2, of_lengths, parts, steps[:2])
        before = len(sent)
        sent.clear()
        posted.clear()
        run_ranks(2, of_lengths, parts, steps)
        assert len(sent) - before == 2 * 2 * 2 * 3  # a header and a tensor; directions; steps; 3
        assert posted[-12:] == [expected] * 12
        sent.clear()


def _of_unused(rank: int, parts: list[nn.Module]) -> list[Any]:
    """The last stage uses one of two outputs; the first stage's weights are frozen or not."""
    found: list[Any] = []
    for is_frozen in (False, True):
        mine = copy.deepcopy(parts[rank]).requires_grad_(rank == 1 or not is_frozen)
        stage = pp.PipelineStage(mine, rank, 2, CPU)
        schedule = pp.ScheduleGPipe(stage, 2, loss_fn=mse)
        x, y = batches(1)[0]
        schedule.step(*([x] if rank == 0 else []), target=y)
        found.append([p.grad for p in mine.parameters()])
    return found


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.used(x), self.unused(x)


class _First(nn.Linear):
    def forward(self, input: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return super().forward(input)


def test_unused_outputs_and_frozen_stages_get_no_gradient_on_2_ranks():
    first, last = run_ranks(2, _of_unused, [_Two(), _First(6, 6).double()])
    assert [g is None for g in first[0]] == [False, False, True, True]
    assert [g is None for g in first[1]] == [True] * 4
    assert not any(g is None for g in last[1])
    assert all(torch.equal(a, b) for a, b in zip(last[0], last[1], strict=True))

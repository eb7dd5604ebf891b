"""The choice of a strategy."""

from __future__ import annotations

import pytest
from torch import nn

from dure.errors import UsageError
from dure.fsdp import explain, fully_shard, strategy
from dure.testing import run_ranks


def test_the_environment_asks_for_a_strategy(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DURE_FSDP_STRATEGY", way)

    def body(rank: int) -> str:
        return explain(fully_shard(nn.Linear(4, 4))).groups[0].strategy

    assert run_ranks(2, body) == [way] * 2


def test_an_unknown_strategy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError), strategy("divided"):
        pass
    monkeypatch.setenv("DURE_FSDP_STRATEGY", "divided")

    def body(rank: int) -> None:
        with pytest.raises(UsageError):
            fully_shard(nn.Linear(4, 4))

    run_ranks(1, body)

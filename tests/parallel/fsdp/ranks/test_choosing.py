"""Which strategy parameters get: by what they are, or as the environment asks."""

from __future__ import annotations

import pytest
from torch import nn

from dure.errors import UsageError
from dure.fsdp import explain, fully_shard, strategy
from dure.tensor import Shard
from dure.testing import run_ranks


def test_the_choice_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    def body(rank: int) -> None:
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        fully_shard(model[0], shard_placement_fn=lambda p: Shard(1))
        fully_shard(model)
        across, root = explain(model).groups[::-1]
        assert (across.strategy, across.why) == ("gathered", "weight is cut in dimension 1")
        assert (root.strategy, root.why) == ("shared", "CPU parameters, ranks on one host")

    run_ranks(2, body)
    printed = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in printed if line.startswith(("(root)", "0 "))]
    assert rows[0][:8] == ["(root)", "1", "16", "float32", "yes", "32", "B", "64"]
    assert rows[1][9:11] == ["gathered", "weight"]
    assert len(rows) == 2  # rank 0 alone prints


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

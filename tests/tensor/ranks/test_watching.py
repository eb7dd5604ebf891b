"""`explain` says what was moved and why."""

from __future__ import annotations

import pytest
import torch

from dure.tensor import (
    Replicate,
    Shard,
    distribute_tensor,
    explain,
    init_device_mesh,
)
from dure.testing import run_ranks


def test_explain_says_what_was_moved_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        a = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        b = distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)])
        told = explain(lambda x, y: torch.relu(x) + y, a, b)
        relu, add = told.operations
        assert (relu.name, relu.steps, relu.why()) == ("aten.relu.default", [], "")
        assert add.name == "aten.add.Tensor"
        assert [step.move.value for step in add.steps] == ["all_to_all"]
        assert add.nbytes == 4 * 4 * 4 // 2 // 2
        assert add.why() in ("operand 1 must be S(0) along tp", "operand 0 must be S(0) along tp")
        assert torch.equal(told.result.full_tensor(), torch.full((4, 4), 2.0))
        moved = explain(a.full_tensor)
        assert [(one.name, one.why()) for one in moved.operations] == [
            ("", "requested by the program")
        ]
        assert (moved.operations[0].inputs, moved.operations[0].outputs) == (
            [a.spec],
            [a.spec.with_placements([Replicate()])],
        )
        read = explain(a[0, 0].item)
        assert "no sharding rule" not in str(read)

    run_ranks(2, body)
    printed = capsys.readouterr().out
    assert "all_to_all[tp]" in printed
    assert printed.count("operator ") == 3  # one rank prints

"""`explain` says what was moved and why; watched operators run as unwatched ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dure.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
    explain,
    init_device_mesh,
)
from dure.tensor.debug import CommDebugMode
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
        assert add.why() in ("operand 1 as S(0) along tp", "operand 0 as S(0) along tp")
        assert torch.equal(told.result.full_tensor(), torch.full((4, 4), 2.0))
        moved = explain(a.full_tensor)
        assert [(one.name, one.why()) for one in moved.operations] == [("", "asked for")]
        assert (moved.operations[0].inputs, moved.operations[0].outputs) == (
            [a.spec],
            [a.spec.with_placements([Replicate()])],
        )
        read = explain(a[0, 0].item)
        assert "no rule" not in str(read)

    run_ranks(2, body)
    printed = capsys.readouterr().out
    assert "all_to_all[tp]" in printed
    assert printed.count("operator ") == 3  # one rank prints


def test_what_is_watched_runs_as_it_does_unwatched() -> None:
    """Torch's own code hands in plain tensors (one_hot, gradients) and writes what it made (norms).

    That is told from a program's doing by who else has the tensor, and by who calls.
    """
    functions: list[Callable[[Any], Any]] = [
        lambda x: x.prod(0),
        lambda x: x.cummax(0).values,
        lambda x: nn.functional.rms_norm(x, (6,)),
        lambda x: nn.functional.one_hot((x.detach() > 0.5).long(), 2) * x[..., None],
    ]

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        whole = torch.rand(4, 6)

        def step(function: Callable[[Any], Any]) -> torch.Tensor:
            x = distribute_tensor(whole.clone(), mesh, [Shard(1)], src_data_rank=None)
            function(x.requires_grad_()).sum().backward()
            assert isinstance(x.grad, DTensor)
            return x.grad.full_tensor()

        for function in functions:
            expected = step(function)
            with CommDebugMode():
                assert torch.equal(step(function), expected)

    run_ranks(2, body)

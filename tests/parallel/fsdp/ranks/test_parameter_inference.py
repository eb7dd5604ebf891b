"""Forwards in inference mode, also the first one; then training."""

# pyright: reportArgumentType=false

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dure.fsdp import fully_shard, strategy
from dure.mesh import init_device_mesh
from dure.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from dure.testing import run_ranks
from tests.parallel.fsdp.ranks.fsdp_models import making, whole

MODES = {"inference": torch.inference_mode, "no_grad": torch.no_grad, "grad": torch.enable_grad}
X = torch.tensor([[1.0, 2.0]])


def made(way: str, tensor_parallel: bool, **options: Any) -> Any:
    """Return y = b(a(x)); a doubles, b adds both numbers."""
    with making:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(2 * torch.eye(2))
        model[1].weight.fill_(1)
    if tensor_parallel:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        options["mesh"] = mesh["dp"]
    with strategy(way):
        fully_shard(model[0], **options)
        return fully_shard(model, **options)


@pytest.mark.parametrize("tensor_parallel", [False, True])
@pytest.mark.parametrize(
    "order",
    [
        ("inference", "grad", "inference", "grad"),
        ("inference", "no_grad", "grad", "grad"),
        ("no_grad", "inference", "grad", "inference"),
    ],
    ids="-".join,
)
def test_forwards_in_any_mode_and_training_between_are_right(
    way: str, order: tuple[str, ...], tensor_parallel: bool
) -> None:
    def body(rank: int) -> None:
        model = made(way, tensor_parallel)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        expected, steps = 6.0, 0
        for mode in order:
            optimizer.zero_grad()
            with MODES[mode]():
                out = model(X)
            assert out.item() == expected
            if mode == "grad":
                out.backward()
                if not steps:
                    assert whole(model[0].weight.grad).tolist() == [[1.0, 2.0], [1.0, 2.0]]
                    assert whole(model[1].weight.grad).tolist() == [[2.0, 4.0]]
                    optimizer.step()  # a: [[1, -2], [-1, 0]], b: [-1, -3]
                    expected, steps = 6.0, 1

    run_ranks(2, body)


def test_wholes_that_are_kept_from_a_forward_in_inference_mode_are_trained(way: str) -> None:
    def body(rank: int) -> None:
        model = made(way, False, reshard_after_forward=False)
        with torch.inference_mode():
            model.unshard()
            assert model(X).item() == 6
        model(X).backward()
        assert whole(model[1].weight.grad).tolist() == [[2.0, 4.0]]

    run_ranks(2, body)

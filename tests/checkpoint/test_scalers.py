"""A GradScaler that is loaded within a step."""

import pytest
import torch
from torch import nn

from dure.checkpoint import Checkpointer
from dure.checkpoint.scalers import set_stages, stages_of
from dure.parallel.amp import GradScaler


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, GradScaler])
def test_after_loading_a_scaler_unscales_the_next_batch(kind, tmp_path):
    """As after a loss that became NaN, which was seen after `unscale_`."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = kind("cpu", init_scale=4.0)  # pyright: ignore[reportArgumentType]
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, scaler=scaler)
    for x in (float("nan"), 1.0):
        model.zero_grad()
        scaler.scale(model(torch.full((1, 2), x)).sum()).backward()
        scaler.unscale_(optimizer)
        checkpointer.load(scaler=scaler)
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[1.0, 1.0]]


def test_what_is_no_scaler_has_no_stages():
    assert stages_of(nn.Linear(1, 1), {"a": object()}) == {}
    set_stages(object(), {"a": ("UNSCALED", {})}, {"a": object()})

"""What mixed precision does to the wrapped module: its dtypes, its buffers, itself after errors."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure.errors import ModuleError
from dure.testing import run_ranks
from tests.thread_ranks import on_ranks
from tests.training.precision_models import BF16


@on_ranks(1)
def test_ignored_modules_compute_in_their_own_dtype_1_rank(rank: int) -> None:
    seen: dict[str, torch.dtype] = {}
    model = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)
    )
    for name, module in model.named_children():

        def note(_: nn.Module, x: Any, y: Any, name: str = name) -> None:
            seen.update({name: x[0].dtype, f"{name} out": y.dtype})

        module.register_forward_hook(note)
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm1d)
    precision = dist.MixedPrecision(
        param_dtype=torch.bfloat16,
        module_classes_to_ignore=(nn.BatchNorm1d, nn.LayerNorm),
        modules_to_ignore=("2",),
    )
    hooks = len(model[2]._forward_pre_hooks)
    ddp = dist.DistributedDataParallel(model, mixed_precision=precision)
    ddp(torch.randn(3, 4)).float().square().sum().backward()
    low, full = torch.bfloat16, torch.float32
    assert [seen[k] for k in "01234"] == [low, low, full, full, low]
    assert seen["2 out"] == full  # before the border: after it is what 3 gets cast up again
    assert len(model[2]._forward_pre_hooks) == hooks
    assert norm.running_mean is not None and norm.running_mean.dtype == full
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {full}


def test_buffers_are_cast_for_the_forward_and_what_it_writes_is_kept_1_rank() -> None:
    class Counting(nn.Module):
        written: torch.Tensor
        replaced: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.register_buffer("written", torch.zeros(2))
            self.register_buffer("replaced", torch.zeros(2))
            self.register_buffer("number", torch.zeros((), dtype=torch.int64))
            self.dtypes: list[torch.dtype] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.written.add_(0.5)
            self.replaced = self.replaced + 0.25
            self.dtypes += [self.written.dtype, self.replaced.dtype, self.number.dtype]
            return (x * self.weight).sum()

    def rank_main(rank: int) -> None:
        model = Counting()
        precision = dist.MixedPrecision(buffer_dtype=torch.bfloat16)
        ddp = dist.DistributedDataParallel(model, mixed_precision=precision)
        before = model.written
        for _ in range(2):
            ddp(torch.ones(2)).backward()
        assert model.dtypes[:3] == [torch.bfloat16, torch.bfloat16, torch.int64]
        assert model.written is before
        assert model.written.tolist() == [1.0, 1.0]
        assert model.replaced.tolist() == [0.5, 0.5]
        assert model.replaced.dtype == torch.float32

    run_ranks(1, rank_main)


def test_module_is_its_float32_self_after_errors_1_rank() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor, where: str) -> torch.Tensor:
            y = self.layer(x)
            if where == "forward":
                raise KeyError(where)
            if where == "backward":
                y.register_hook(lambda _: (_ for _ in ()).throw(KeyError(where)))
            return y.clone()

    def rank_main(rank: int) -> None:
        model = Broken()
        ddp = dist.DistributedDataParallel(model, mixed_precision=BF16)
        with pytest.raises(KeyError):
            ddp(torch.ones(1, 2), "forward")
        assert model.layer.weight.dtype == torch.float32
        with pytest.raises(KeyError):
            ddp(torch.ones(1, 2), "backward").float().sum().backward()
        assert model.layer.weight.dtype == torch.float32
        ddp(torch.ones(1, 2), "").float().sum().backward()
        assert "weight" not in model.layer.__dict__
        assert model.layer.weight.dtype == torch.float32
        with torch.no_grad():
            assert ddp(torch.ones(1, 2), "").dtype == torch.bfloat16
        assert "weight" not in model.layer.__dict__

    run_ranks(1, rank_main)


@on_ranks(1)
def test_copy_and_pickle_keep_the_precision_1_rank(rank: int) -> None:
    ddp = dist.DistributedDataParallel(nn.Linear(2, 2), mixed_precision=BF16)
    ddp(torch.ones(1, 2)).float().sum().backward()
    for again in (copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))):
        assert again.mixed_precision == BF16
        assert again(torch.ones(1, 2)).dtype == torch.bfloat16


@pytest.mark.parametrize("wrong", [{"param_dtype": torch.int8}, {"reduce_dtype": torch.complex64}])
def test_dtypes_that_are_not_floating_point_are_refused(wrong: dict[str, torch.dtype]) -> None:
    with pytest.raises(ModuleError):
        dist.MixedPrecision(**wrong)  # pyright: ignore[reportArgumentType]


@on_ranks(1)
def test_ignored_module_that_is_not_there_is_refused_1_rank(rank: int) -> None:
    precision = dist.MixedPrecision(param_dtype=torch.bfloat16, modules_to_ignore=("head",))
    with pytest.raises(ModuleError) as caught:
        dist.DistributedDataParallel(nn.Linear(2, 2), mixed_precision=precision)
    assert caught.value.parameters == ("head",)

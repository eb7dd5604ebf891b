"""Tensor subclasses with methods of their own for the all_gather."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dure.errors import ModuleError, UsageError
from dure.fsdp import explain, fully_shard, strategy
from dure.tensor import DTensor
from dure.testing import run_ranks


class Halves(torch.Tensor):
    """Float64 values that travel as float32 numbers and one scale a row."""

    data_: torch.Tensor
    asked: list[Any]

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Halves:
        made = torch.Tensor._make_wrapper_subclass(  # pyright: ignore
            cls, data.shape, strides=data.stride(), dtype=data.dtype, device=data.device
        )
        made.data_ = data
        made.asked = []
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def bare(x: Any) -> Any:
            return x.data_ if isinstance(x, Halves) else x

        out = func(
            *torch.utils._pytree.tree_map(bare, args),
            **torch.utils._pytree.tree_map(bare, kwargs or {}),
        )
        same = {torch.ops.aten.detach, torch.ops.aten.slice, torch.ops.aten.clone}
        if func._overloadpacket in same:
            return cls(out)
        return args[0] if func._schema.name.endswith("_") else out

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        self.asked.append((mesh.size(), tuple(outer_size), tuple(outer_stride), type(module)))
        scale = self.data_.abs().amax(1, keepdim=True).clamp_min(1e-300)
        return ((self.data_ / scale).float(), scale), "metadata"

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        assert metadata == "metadata"
        values, scale = outputs
        if out is not None:
            torch.mul(values.double(), scale, out=out.detach())
            return None
        full = (values.double() * scale).to(param_dtype)
        return full, (full,)


@pytest.mark.parametrize("rows", [6, 7])
def test_tensor_subclasses_say_what_is_gathered(rows: int) -> None:
    """Values that float32 has exactly, times a scale a row: the same as without."""
    torch.manual_seed(0)
    start = torch.randint(-4, 5, (rows, 3)).double()

    def train(weight: Any, size: int, rank: int, prepare: Any) -> Any:
        model = nn.Linear(3, rows, bias=True).double()
        with torch.no_grad():
            model.bias.fill_(0.5)
        model.weight = nn.Parameter(weight)
        prepare(model)
        x = torch.arange(12.0, dtype=torch.double).view(4, 3)
        losses = []
        for step in range(3):
            loss = (model(x.chunk(size)[rank]) + step).square().mean()
            loss.backward()
            losses.append(loss.detach())
            gradient = model.weight.grad
            model.zero_grad()
        return model, torch.stack(losses), gradient

    _, losses, gradient = train(start, 1, 0, lambda m: None)

    def body(rank: int) -> Any:
        model, got, grad = train(Halves(start.clone()), 2, rank, fully_shard)
        part = model.weight.part
        assert isinstance(part, Halves)
        assert isinstance(model.bias, DTensor)
        assert explain(model).groups[1].strategy == "shared"  # beside it
        assert part.asked == [(2, (rows, 3), (3, 1), type(model))] * 3
        return got, grad.full_tensor()

    results = run_ranks(2, body)
    torch.testing.assert_close(torch.stack([r[0] for r in results]).mean(0), losses)
    for _, grad in results:
        torch.testing.assert_close(grad, gradient)


def test_a_subclass_with_one_of_the_methods_is_refused() -> None:
    class Lacking(Halves):
        fsdp_post_all_gather = property()  # pyright: ignore

    def body(rank: int) -> None:
        model = nn.Linear(3, 4).double()
        model.weight = nn.Parameter(Lacking(torch.ones(4, 3).double()))
        with pytest.raises(ModuleError):
            fully_shard(model)
        model.weight = nn.Parameter(Halves(torch.ones(4, 3).double()))
        with strategy("shared"), pytest.raises(UsageError):
            fully_shard(model)

    run_ranks(2, body)

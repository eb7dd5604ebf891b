"""What programs bring along: collectives of their own, tensor subclasses that are gathered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure.device_mesh import init_device_mesh
from dure.errors import ModuleError, UsageError
from dure.fsdp import MixedPrecisionPolicy, fully_shard, strategy
from dure.tensor import DTensor
from dure.testing import CommRecorder, run_ranks
from ranks.fsdp_models import Net, batch, by_step, compare, loss_of, made, shard


class Comm:
    """Torch's interfaces, over Dure's collectives; counts calls."""

    def __init__(self, answers: bool) -> None:
        self.allocated, self.called, self.answers = 0, 0, answers

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        self.allocated += 1
        return torch.full(tuple(size), 77, dtype=dtype, device=device)


class Gather(Comm):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool) -> Any:
        self.called += 1
        work = dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=True)
        if self.answers:
            return work
        work.wait()  # pyright: ignore
        return None


class Scatter(Comm):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool):
        self.called += 1
        work = dist.reduce_scatter_single(
            output_tensor, input_tensor, op=op, group=group, async_op=True
        )
        if self.answers:
            return work
        work.wait()  # pyright: ignore
        return None


@pytest.fixture(params=["gathered", "shared"])
def way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("answers", [True, False])
def test_collectives_of_the_program(way: str, answers: bool) -> None:
    counts: list[tuple[int, int]] = []

    def prepare(model: Net) -> None:
        shard(model)
        gather, scatter = Gather(answers), Scatter(answers)
        block: Any = model.blocks[1]
        block.set_custom_all_gather(gather)
        block.set_custom_reduce_scatter(scatter)
        block.register_full_backward_hook(lambda *_: counts.append((gather.called, scatter.called)))
        model.finish = lambda: (gather.called, gather.allocated, scatter.called)  # pyright: ignore

    done: list[Any] = []
    compare(
        way,
        3,
        prepare=prepare,
        before_step=lambda m: done.append(m.finish()) if hasattr(m, "finish") else None,  # pyright: ignore
    )
    # A step gathers for forward and for backward, and reduces once; each has an input, an output.
    assert sorted(done)[-1] == (6, 12, 3)


def test_a_reduce_scatter_of_the_program_leaves_parameters_shared() -> None:
    def body(rank: int) -> list[str]:
        model: Any = made()
        with strategy("shared"):
            shard(model)
        model.set_custom_reduce_scatter(Scatter(True))
        with CommRecorder() as recorder:
            by_step(model, 0, 2, rank)
        return recorder.ops

    for ops in run_ranks(2, body):
        assert "all_gather_single" not in ops


# ---------------------------------------------------------------- a smaller number of ranks


@pytest.mark.parametrize("near", [2, 4])
def test_wholes_are_kept_between_near_ranks_until_backward(near: int) -> None:
    compare("gathered", 4, prepare=lambda m: shard(m, reshard_after_forward=near))


def test_near_ranks_gather_between_them() -> None:
    """Of four ranks: forward gathers from all, backward from two."""

    def body(rank: int) -> list[int]:
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        with strategy("gathered"):
            fully_shard(model[0], reshard_after_forward=2)
            fully_shard(model)
        with CommRecorder() as recorder:
            model(torch.ones(2, 4, requires_grad=True)).sum().backward()
        return [e.world_size for e in recorder.events if e.op == "all_gather_single"]

    assert run_ranks(4, body) == [[4, 4, 2]] * 4


def test_what_near_ranks_kept_goes_when_weights_change() -> None:
    def step(model: nn.Module, number: int, size: int = 1, rank: int = 0) -> torch.Tensor:
        loss_of(model, batch(number + 7))
        return by_step(model, number, size, rank)

    def prepare(model: Net) -> None:
        shard(model, reshard_after_forward=2)

    compare("gathered", 4, prepare=prepare, step=step, expected_step=step)


def test_near_ranks_beside_replicas_and_unnamed_axes() -> None:
    def prepare(model: Net) -> None:
        shard(model, mesh=init_device_mesh("cpu", (1, 4)), reshard_after_forward=2)

    compare("gathered", 4, prepare=prepare)


# ---------------------------------------------------------------- tensor subclasses


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
        whole = (values.double() * scale).to(param_dtype)
        return whole, (whole,)


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
        assert model.bias._dure_turns  # beside it, parameters that are shared
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
        with pytest.raises(ModuleError, match="both fsdp_pre_all_gather"):
            fully_shard(model)
        model.weight = nn.Parameter(Halves(torch.ones(4, 3).double()))
        with strategy("shared"), pytest.raises(UsageError, match="share"):
            fully_shard(model)

    run_ranks(2, body)


def test_rows_that_do_not_fit_are_refused_by_name() -> None:
    class Odd(Halves):
        def fsdp_pre_all_gather(self, *args: Any) -> Any:
            return (torch.ones(9, 3), torch.ones(9, 1)), "metadata"

    def body(rank: int) -> None:
        model = nn.Linear(3, 5, bias=False).double()
        model.weight = nn.Parameter(Odd(torch.ones(5, 3).double()))
        fully_shard(model, mp_policy=MixedPrecisionPolicy())
        with pytest.raises(ModuleError, match="cut unevenly") as error:
            model(torch.ones(2, 3).double())
        assert error.value.parameters == ("weight",)

    run_ranks(2, body)

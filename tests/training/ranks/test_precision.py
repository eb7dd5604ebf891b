"""DDP that computes and reduces in fewer bits than its parameters have."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dure as dist
from dure.errors import ModuleError
from dure.mesh import init_device_mesh
from dure.tensor import Replicate
from dure.testing import CommRecorder, run_ranks
from tests.parallel.ddp.ddp_models import Layers
from tests.parallel.pending_terms import SMALL, Scale, backward, rows
from tests.thread_ranks import on_ranks

BF16 = dist.MixedPrecision(param_dtype=torch.bfloat16)


class Net(nn.Module):
    """Layers of several kinds, with a tied weight, a shared layer and a part to checkpoint."""

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8))
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.recompute = recompute
        self.seen: list[torch.dtype] = []

    def tied(self) -> torch.Tensor:
        first = self.body[0]
        assert isinstance(first, nn.Linear)
        return first.weight

    def part(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.dtype)
        return nn.functional.linear(self.body(self.body(x)), self.tied())

    def forward(self, tokens: torch.Tensor, scale: torch.Tensor | float = 1.0) -> torch.Tensor:
        x = self.embed(tokens) * scale
        if self.recompute is None:
            x = self.part(x)
        else:
            x = checkpoint(self.part, x, use_reentrant=self.recompute)
        return nn.functional.linear(self.rnn(x)[0], self.embed.weight)


def made(recompute: bool | None = None) -> Net:
    net = Net(recompute)
    generator = torch.Generator().manual_seed(3)  # of its own: the ranks are threads
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.uniform_(-0.4, 0.4, generator=generator)
    return net


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randint(7, (2, 5), generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def low_precision_gradients(model: nn.Module, tokens: torch.Tensor) -> list[torch.Tensor]:
    """The reference: the same module as a whole in bfloat16."""
    low = copy.deepcopy(model).to(torch.bfloat16)
    loss_of(low(tokens, torch.tensor(0.5, dtype=torch.bfloat16)), tokens).backward()
    return [p.grad for p in low.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("n", "recompute"), [(1, None), (2, None), (2, False), (2, True), (4, None)]
)
def test_training_is_that_of_low_precision_copies_of_master_weights(n, recompute):
    # The oracle is written out: torch's own mixed precision needs streams, which a CPU has not.
    steps = 2

    def rank_main(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        ddp: Any = dist.DistributedDataParallel(made(recompute), mixed_precision=BF16)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.02)
        for step in range(steps):
            optimizer.zero_grad()
            logits = ddp(batch(rank, step), torch.tensor(0.5))
            assert logits.dtype == torch.bfloat16
            loss_of(logits, batch(rank, step)).backward()
            optimizer.step()
        assert set(ddp.module.seen) == {torch.bfloat16}
        assert {t.dtype for t in ddp.state_dict().values()} == {torch.float32}
        assert ddp.module.embed.weight is dict(ddp.module.named_parameters())["embed.weight"]
        return [p.detach() for p in ddp.parameters()], [p.grad for p in ddp.parameters()]

    master = made(recompute)
    optimizer = torch.optim.AdamW(master.parameters(), lr=0.02)
    for step in range(steps):
        parts = [low_precision_gradients(master, batch(r, step)) for r in range(n)]
        for p, grads in zip(master.parameters(), zip(*parts, strict=True), strict=True):
            p.grad = (torch.stack(grads).float().sum(0) / n).to(torch.bfloat16).float()
        optimizer.step()
    parameters, gradients = zip(*((p.detach(), p.grad) for p in master.parameters()), strict=True)
    for found in run_ranks(n, rank_main):
        torch.testing.assert_close(found, ([*parameters], [*gradients]), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("precision", "itemsize"),
    [
        (None, 4),
        (dist.MixedPrecision(param_dtype=torch.bfloat16), 2),
        (dist.MixedPrecision(reduce_dtype=torch.bfloat16), 2),
        (dist.MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32), 4),
    ],
)
def test_bytes_on_the_way_are_those_of_the_reduce_dtype_2_ranks(precision, itemsize):
    def rank_main(rank: int) -> list[Any]:
        model = nn.Linear(64, 64)
        ddp = dist.DistributedDataParallel(model, mixed_precision=precision)
        with CommRecorder() as seen:
            ddp(torch.ones(1, 64)).float().sum().backward()
        return [seen.ops, seen.nbytes()]

    numbers = 64 * 64 + 64 + 3  # the bitmap: a number for each of two gradients, and one more
    assert run_ranks(2, rank_main) == [[["all_reduce"], numbers * itemsize]] * 2


def test_accumulation_is_in_float32_2_ranks():
    # Eight gradients of 1 + 2**-8 of the first: in bfloat16 the small parts would be lost.
    def rank_main(rank: int) -> float:
        model = nn.Linear(1, 1, bias=False)
        precision = dist.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        ddp = dist.DistributedDataParallel(model, mixed_precision=precision)
        with ddp.no_sync():
            ddp(torch.full((1, 1), 256.0)).sum().backward()
            for _ in range(7):
                ddp(torch.ones(1, 1)).sum().backward()
        ddp(torch.ones(1, 1)).sum().backward()
        assert model.weight.grad is not None
        return float(model.weight.grad)

    assert run_ranks(2, rank_main) == [264.0] * 2


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_accumulated_gradients_survive_new_buckets_2_ranks(dtype):
    def rank_main(rank: int) -> list[float]:
        model = Layers(3)
        ddp = dist.DistributedDataParallel(
            model, bucket_cap_mb=1e-6, mixed_precision=dist.MixedPrecision(reduce_dtype=dtype)
        )
        ddp(torch.ones(1, 2), 2, 1, 0).backward()  # against the order of registration
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(torch.full((1, 2), 2.0 * rank), 0, 1).backward()
        ddp(torch.ones(1, 2), 1, 2).backward()  # new buckets; layer 0 is not used
        assert ddp._get_ddp_logging_data()["has_rebuilt_buckets"]
        return [float(p.grad[0, 0]) for p in model.parameters() if p.grad is not None]

    assert run_ranks(2, rank_main) == [[1.0, 2.0, 1.0]] * 2


@on_ranks(1)
def test_ignored_modules_compute_in_their_own_dtype_1_rank(rank):
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


def test_buffers_are_cast_for_the_forward_and_what_it_writes_is_kept_1_rank():
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


@pytest.mark.parametrize("wrong", [{"param_dtype": torch.int8}, {"reduce_dtype": torch.complex64}])
def test_dtypes_that_are_not_floating_point_are_refused(wrong):
    with pytest.raises(ModuleError):
        dist.MixedPrecision(**wrong)  # pyright: ignore[reportArgumentType]


# --------------------------------------------------------------------------------------------------
# DDP reduces in `reduce_dtype` whatever parameters are: DTensors, and those with sparse gradients.
# 1 + SMALL is 1 in bfloat16, and exact in float32.


@pytest.mark.parametrize(
    ("param_dtype", "reduce_dtype", "expected"),
    [
        (torch.bfloat16, torch.float32, 1 + SMALL),
        (None, torch.bfloat16, 1.0),
        (None, None, 1 + SMALL),
    ],
)
def test_terms_over_tensor_parallel_ranks_4_ranks(param_dtype, reduce_dtype, expected):
    def rank_main(rank: int) -> list[float]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        precision = dist.MixedPrecision(param_dtype, reduce_dtype)
        ddp = dist.DistributedDataParallel(
            Scale(mesh["tp"]), mesh=mesh["dp"], mixed_precision=precision
        )
        x = rows(mesh)
        with ddp.no_sync():
            backward(ddp, x)
        backward(ddp, x)
        grad: Any = ddp.module.weight.grad
        assert grad.dtype == torch.float32 and grad.placements == (Replicate(),)
        return grad.to_local().tolist()

    assert run_ranks(4, rank_main) == [[expected * 2] * 2] * 4

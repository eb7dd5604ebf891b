"""Operators of DTensors on one rank, beside the same on plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from dure.errors import DureError
from dure.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh, rand
from gpu.checks import DEVICE, Refused, check, equal, full, one_rank, told
from gpu.train import sharded, small_model


def operator(
    name: str, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, cuda: bool = False
) -> Callable[..., Any]:
    """Add a check of a function and its gradients, on DTensors and on plain tensors."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        def run() -> str:
            with one_rank():
                mesh = init_device_mesh(DEVICE.type, (1,))
                torch.manual_seed(0)
                plain = [torch.randn(s, device=DEVICE).to(dtype).requires_grad_() for s in shapes]
                refused: list[str] = []
                for placement in (Shard(0), Replicate()):
                    divided = [
                        distribute_tensor(t.detach(), mesh, [placement]).requires_grad_()
                        for t in plain
                    ]
                    try:
                        found, wanted = function(*divided), function(*plain)
                        loose = {"rtol": 2e-2, "atol": 2e-2} if dtype.itemsize < 4 else {}
                        torch.testing.assert_close(full(found), wanted, **loose)
                        found.float().sum().backward()
                        wanted.float().sum().backward()
                        for one, other in zip(divided, plain, strict=True):
                            torch.testing.assert_close(full(one.grad), other.grad, **loose)
                            other.grad = None
                    except DureError as error:
                        refused.append(f"{placement}: {told(error)}")
                if refused:
                    raise Refused("; ".join(refused))
                return ""

        check("train", f"DTensor: {name}", cuda)(run)
        return function

    return add


def beside(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return `other` on the device, as a DTensor where `x` is one."""
    other = other.to(DEVICE)
    return distribute_tensor(other, x.device_mesh, [Replicate()]) if type(x) is DTensor else other


def attention(kernel: str) -> None:
    """Add the checks of one kernel of attention."""
    shape = (2, 4, 64, 64)

    for is_causal in (False, True):
        name = f"attention, {kernel.lower()}{', causal' if is_causal else ''}"

        @operator(name, shape, shape, shape, dtype=torch.bfloat16, cuda=True)
        def run(q: Any, k: Any, v: Any, is_causal: bool = is_causal) -> Any:
            with sdpa_kernel(getattr(SDPBackend, kernel)):
                return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


for _kernel in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"):
    attention(_kernel)

operator("attention, float32", *[(2, 4, 8, 16)] * 3)(F.scaled_dot_product_attention)
operator("linear", (8, 16), (4, 16), (4,))(F.linear)
operator("linear, bf16", (8, 16), (4, 16), (4,), dtype=torch.bfloat16)(F.linear)
operator("layer_norm", (8, 16), (16,), (16,))(lambda x, w, b: F.layer_norm(x, (16,), w, b))
operator("rms_norm", (8, 16), (16,))(lambda x, w: F.rms_norm(x, (16,), w))
operator("group_norm", (2, 8, 4), (8,), (8,))(lambda x, w, b: F.group_norm(x, 4, w, b))
operator("conv2d", (2, 3, 8, 8), (4, 3, 3, 3), (4,))(F.conv2d)
operator("max_pool2d", (2, 3, 8, 8))(lambda x: F.max_pool2d(x, 2))
operator("softmax", (4, 8))(lambda x: F.softmax(x, -1).square())
operator("gelu and silu", (4, 8))(lambda x: F.gelu(x) + F.silu(x))
operator("bmm", (2, 4, 8), (2, 8, 4))(torch.bmm)
operator("cumsum and sort", (4, 8))(lambda x: x.cumsum(-1).sort(-1).values)
operator("topk", (4, 8))(lambda x: x.topk(2).values)
operator("index", (4, 8))(lambda x: x[:, [0, 2, 2]])


@operator("cross_entropy", (8, 10))
def _cross_entropy(x: Any) -> Any:
    return F.cross_entropy(x, beside(x, torch.arange(8)))


@operator("embedding", (10, 4))
def _embedding(table: Any) -> Any:
    return F.embedding(beside(table, torch.tensor([0, 3, 3, 9])), table)


@operator("batch_norm, training", (4, 8, 4, 4), (8,), (8,))
def _batch_norm(x: Any, w: Any, b: Any) -> Any:
    return F.batch_norm(x, None, None, w, b, training=True)


@operator("batch_norm, running statistics", (4, 8, 4, 4))
def _batch_norm_eval(x: Any) -> Any:
    return F.batch_norm(x, beside(x, torch.zeros(8)), beside(x, torch.ones(8)))


@check("train", "DTensor: _scaled_mm", cuda=True)
def scaled_mm() -> None:
    """A product of float8 matrices."""
    with one_rank():
        mesh = init_device_mesh(DEVICE.type, (1,))
        a = torch.randn(32, 64, device=DEVICE).to(torch.float8_e4m3fn)
        b = torch.randn(16, 64, device=DEVICE).to(torch.float8_e4m3fn).t()
        one = torch.ones((), device=DEVICE)
        wanted = torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16)
        for placement in (Shard(0), Replicate()):
            x = distribute_tensor(a, mesh, [placement])
            y, s = (distribute_tensor(t, mesh, [Replicate()]) for t in (b.t(), one))
            found = torch._scaled_mm(x, y.t(), s, s, out_dtype=torch.bfloat16)
            assert equal(found.full_tensor(), wanted)


@check("train", "DTensor: _grouped_mm", cuda=True)
def grouped_mm() -> None:
    """A product for each expert."""
    with one_rank():
        mesh = init_device_mesh(DEVICE.type, (1,))
        a = torch.randn(32, 64, device=DEVICE, dtype=torch.bfloat16)
        b = torch.randn(2, 64, 16, device=DEVICE, dtype=torch.bfloat16)
        ends = torch.tensor([16, 32], device=DEVICE, dtype=torch.int32)
        wanted = torch._grouped_mm(a, b, offs=ends)
        x, y, o = (distribute_tensor(t, mesh, [Replicate()]) for t in (a, b, ends))
        assert equal(torch._grouped_mm(x, y, offs=o).full_tensor(), wanted)


@check("train", "DTensor: _int_mm", cuda=True)
def int_mm() -> None:
    """A product of int8 matrices."""
    with one_rank():
        mesh = init_device_mesh(DEVICE.type, (1,))
        a = torch.randint(-4, 4, (32, 64), device=DEVICE, dtype=torch.int8)
        b = torch.randint(-4, 4, (64, 32), device=DEVICE, dtype=torch.int8)
        x, y = (distribute_tensor(t, mesh, [Replicate()]) for t in (a, b))
        assert equal(torch._int_mm(x, y).full_tensor(), torch._int_mm(a, b))


@check("train", "DTensor: dropout and random numbers")
def random_numbers() -> None:
    """The same seed, the same numbers; dropout keeps some."""
    with one_rank():
        mesh = init_device_mesh(DEVICE.type, (1,))
        torch.manual_seed(3)
        one = rand(100, device_mesh=mesh, placements=[Shard(0)]).full_tensor()
        torch.manual_seed(3)
        again = rand(100, device_mesh=mesh, placements=[Shard(0)]).full_tensor()
        assert one.device.type == DEVICE.type
        assert torch.equal(one, again)
        ones = distribute_tensor(torch.ones(1000, device=DEVICE), mesh, [Shard(0)])
        assert 300 < F.dropout(ones, 0.5).full_tensor().count_nonzero().item() < 700


def optimizers(name: str, options: dict[str, Any]) -> None:
    """Add the check of optimizers on DTensors beside plain tensors."""

    @check("train", f"DTensor: optimizers, {name}", cuda="capturable" in options)
    def run() -> str:
        kinds = [torch.optim.Adam, torch.optim.AdamW]
        kinds += [] if "capturable" in options else [torch.optim.SGD]
        with one_rank():
            for kind in kinds:
                models = [sharded(), small_model()]
                for model in models:
                    optimizer = kind(model.parameters(), lr=1e-2, **options)
                    for _ in range(2):
                        model(torch.ones(2, 16, device=DEVICE)).square().sum().backward()
                        optimizer.step()
                for one, other in zip(*(m.parameters() for m in models), strict=True):
                    torch.testing.assert_close(full(one), other, rtol=1e-5, atol=1e-6)
        return ", ".join(kind.__name__ for kind in kinds)


optimizers("foreach", {"foreach": True})
optimizers("fused", {"fused": True})
optimizers("capturable", {"capturable": True})

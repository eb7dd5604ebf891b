"""Training with one rank: DDP, FSDP, tensor parallel, pipeline, checkpoints, RPC."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import dure as dist
from dure.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from gpu.checks import DEVICE, bytes_of, check, equal, full, one_rank


def small_model(width: int = 16) -> nn.Sequential:
    """Return the same model each time."""
    torch.manual_seed(0)
    layers = [
        nn.Linear(width, 2 * width),
        nn.GELU(),
        nn.Linear(2 * width, width),
        nn.LayerNorm(width),
    ]
    return nn.Sequential(*layers).to(DEVICE)


def steps(model: Any, rank: int = 0, ranks: int = 1, **options: Any) -> torch.Tensor:
    """Train a little on this rank's part of the batches, and return the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(3):
        x = torch.randn(8, 16, generator=generator).chunk(ranks)[rank].to(DEVICE)
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(full(loss.detach()))
    return torch.stack(losses)


def same_losses(model: Any, tolerance: float = 1e-6, **options: Any) -> None:
    """Compare with the model in one process."""
    torch.testing.assert_close(
        steps(model, **options), steps(small_model()), rtol=tolerance, atol=tolerance
    )


@check("train")
def ddp() -> None:
    """With and without views of buckets, and a static graph."""
    with one_rank():
        for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
            same_losses(dist.DistributedDataParallel(small_model(), **options))
        ids = [0] if DEVICE.type == "cuda" else None
        same_losses(dist.DistributedDataParallel(small_model(), device_ids=ids))


@check("train")
def ddp_with_communication_hooks() -> None:
    """bf16 compression and PowerSGD."""
    with one_rank():
        model = dist.DistributedDataParallel(small_model())
        model.register_comm_hook(None, dist.bf16_compress_hook)
        same_losses(model, 2e-2)
        model = dist.DistributedDataParallel(small_model())
        model.register_comm_hook(dist.PowerSGDState(None, 1, 2), dist.powerSGD_hook)
        steps(model)


@check("train")
def ddp_autocast_and_scaler() -> None:
    """float16 with a `GradScaler`."""
    with one_rank():
        model = dist.DistributedDataParallel(small_model())
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), dist.GradScaler()
        for _ in range(3):
            with torch.autocast(DEVICE.type, torch.float16):
                loss = model(torch.ones(4, 16, device=DEVICE)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            dist.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()


@check("train")
def sharded_optimizer_and_sync_batch_norm() -> None:
    """`ZeroRedundancyOptimizer` and `dure.SyncBatchNorm`."""
    with one_rank():
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(DEVICE)
        model = dist.SyncBatchNorm.convert_sync_batchnorm(model)
        model = dist.DistributedDataParallel(model)
        optimizer = dist.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
        for _ in range(2):
            model(torch.randn(4, 3, 8, 8, device=DEVICE)).square().mean().backward()
            optimizer.step()


def sharded(**options: Any) -> nn.Module:
    """Return the small model under `fully_shard`."""
    from dure.fsdp import fully_shard

    model = small_model()
    for layer in (model[0], model[2]):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def fsdp_check(name: str, tolerance: float = 1e-5, **options: Any) -> None:
    """Add a check of `fully_shard` with options; values may be functions that make them."""
    shares = options.get("strategy") == "shared"  # nor do gloo and GPUs

    @check("train", f"fully_shard, {name}", may_refuse=shares)
    def run() -> str:
        from dure import fsdp

        with one_rank():
            made = {k: v() if callable(v) else v for k, v in options.items()}
            chosen = made.pop("strategy", None)
            with fsdp.strategy(chosen) if chosen else nullcontext():
                model = sharded(**made)
            same_losses(model, tolerance)
            norm = dist.clip_grad_norm_(model.parameters(), 1.0)
            assert norm.device.type == DEVICE.type or options.get("offload_policy")
            return ""


def _policy(name: str, *args: Any) -> Callable[[], Any]:
    def make() -> Any:
        from dure import fsdp

        return getattr(fsdp, name)(*args)

    return make


fsdp_check("default")
fsdp_check("gathered", strategy="gathered")
fsdp_check("shared", strategy="shared")
fsdp_check("kept after forward", reshard_after_forward=False)
fsdp_check("bf16", 5e-2, mp_policy=_policy("MixedPrecisionPolicy", torch.bfloat16, torch.float32))
fsdp_check("offloaded", offload_policy=_policy("CPUOffloadPolicy"))
fsdp_check("offloaded, not pinned", offload_policy=_policy("CPUOffloadPolicy", False))


@check("train")
def fully_shard_state() -> None:
    """State dicts, full parameters, gradient accumulation, clipping."""
    from dure import fsdp

    with one_rank():
        model = sharded()
        model.set_requires_gradient_sync(False)
        model(torch.ones(2, 16, device=DEVICE)).sum().backward()
        model.set_requires_gradient_sync(True)
        model(torch.ones(2, 16, device=DEVICE)).sum().backward()
        assert dist.clip_grad_norm_(model.parameters(), 1.0).item() > 0
        state = {k: v.full_tensor() for k, v in model.state_dict().items()}
        assert all(equal(t, small_model().state_dict()[name]) for name, t in state.items())
        with fsdp.full_parameters(model):
            assert model[0].weight.shape == (32, 16)
        model.load_state_dict(model.state_dict())


class Attention(nn.Module):
    """Heads are found by the width of the projections, so that it can be divided."""

    def __init__(self, width: int = 16, head: int = 8) -> None:
        super().__init__()
        self.head = head
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return [batch, length, width]."""
        heads = [
            layer(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        ]
        out = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """One layer of a transformer with vocabulary."""

    def __init__(self, head: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 16)
        self.norm, self.attention = nn.RMSNorm(16), Attention(head=head)
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 24)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return scores [batch, length, 24]."""
        x = self.embed(tokens)
        x = x + self.attention(self.norm(x))
        return self.head(x + self.down(F.silu(self.up(x))))


def _plan() -> dict[str, Any]:
    from dure.tensor import parallel as p

    gather = p.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    up = p.ColwiseParallel(input_layouts=Shard(1))
    head = p.ColwiseParallel(
        input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
    )
    return {
        "embed": p.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": p.SequenceParallel(),
        "attention": gather,
        "attention.[qkv]": p.ColwiseParallel(),
        "attention.out": p.RowwiseParallel(output_layouts=Shard(1)),
        "up": up,
        "down": p.RowwiseParallel(output_layouts=Shard(1)),
        "head": head,
    }


def divided(ranks: int) -> None:
    """Compare the block, divided over the ranks of the job, with the block in one process."""
    from dure.tensor.parallel import loss_parallel, parallelize_module

    torch.manual_seed(0)
    alone = Block(head=min(8, 16 // ranks)).to(DEVICE)
    mesh = init_device_mesh(DEVICE.type, (ranks,))
    model = parallelize_module(copy.deepcopy(alone), mesh, _plan())
    tokens = (torch.arange(34).view(2, 17) % 24).to(DEVICE)
    with loss_parallel():
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
    wanted = F.cross_entropy(alone(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    wanted.backward()
    torch.testing.assert_close(loss.full_tensor(), wanted, rtol=1e-5, atol=1e-5)
    for found, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found.grad.full_tensor(), other.grad, rtol=1e-3, atol=1e-5)
    assert dist.clip_grad_norm_(model.parameters(), 1.0).device.type == DEVICE.type


@check("train")
def tensor_parallel_plan_and_loss_parallel() -> None:
    """Embedding, sequence parallel norm, attention, columns, rows, divided scores."""
    with one_rank():
        divided(1)


@check("train")
def pipeline() -> None:
    """Two stages on one rank, interleaved."""
    from dure.pipelining import PipelineOptions, PipelineStage, ScheduleInterleaved1F1B

    with one_rank():
        parts = [nn.Linear(16, 16).to(DEVICE) for _ in range(2)]
        stages = [PipelineStage(part, i, 2, DEVICE) for i, part in enumerate(parts)]
        x = torch.randn(8, 16, device=DEVICE)
        schedule = ScheduleInterleaved1F1B(
            stages,
            4,
            lambda y, target: (y - target).square().mean(),
            options=PipelineOptions(losses_everywhere=True),
        )
        losses: list[torch.Tensor] = []
        schedule.step(x, target=torch.zeros(8, 16, device=DEVICE), losses=losses)
        wanted = parts[1](parts[0](x)).square().mean()
        torch.testing.assert_close(torch.stack(losses).mean(), wanted, rtol=1e-5, atol=1e-6)


def saved_and_loaded(folder: str, ranks: int) -> None:
    """Save DTensors over the ranks of the job, and load them with other placements."""
    from dure.checkpoint import async_save, load, save

    mesh = init_device_mesh(DEVICE.type, (ranks,))
    wanted = torch.arange(24.0, device=DEVICE).view(4, 6)
    for number, write in enumerate((save, async_save)):
        state = {"x": distribute_tensor(wanted, mesh, [Shard(0)]), "y": wanted.bfloat16()}
        pending = write(state, checkpoint_id=f"{folder}/{number}")
        if write is async_save:
            pending.result()
        empty = distribute_tensor(torch.zeros_like(wanted), mesh, [Shard(1)])
        found = {"x": empty, "y": torch.zeros_like(wanted, dtype=torch.bfloat16)}
        load(found, checkpoint_id=f"{folder}/{number}")
        assert equal(found["x"].full_tensor(), wanted)
        assert equal(found["y"], wanted.bfloat16())


@check("train")
def checkpoint_of_dtensors() -> None:
    """`save`, `async_save` and `load` of DTensors and plain tensors."""
    with one_rank(), tempfile.TemporaryDirectory() as folder:
        saved_and_loaded(folder, 1)


@check("train")
def checkpointer() -> None:
    """A `Checkpointer` brings a model, its optimizer and the random generators back."""
    from dure.checkpoint import Checkpointer

    for wrap in (dist.DistributedDataParallel, lambda model: sharded()):
        with one_rank(), tempfile.TemporaryDirectory() as folder:
            model = wrap(small_model())
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            model(torch.ones(2, 16, device=DEVICE)).square().sum().backward()
            optimizer.step()
            kept = Checkpointer(folder)
            kept.save(1, model=model, optimizer=optimizer)
            after = torch.rand(3, device=DEVICE)
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.step()
            assert kept.load(model=model, optimizer=optimizer) == 1
            assert torch.equal(torch.rand(3, device=DEVICE), after)
            for found, wanted in zip(model.parameters(), before, strict=True):
                assert bytes_of(full(found)) == bytes_of(full(wanted))


def _serve(device: str) -> list[Any]:
    from dure import rpc

    rank = int(os.environ["RANK"])
    maps = {} if device == "cpu" else {f"worker{1 - rank}": {device: device}}
    options = rpc.TensorPipeRpcBackendOptions(device_maps=maps)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    found: list[Any] = []
    if rank == 0:
        x = torch.ones(3, device=device)
        result = rpc.rpc_sync("worker1", torch.add, args=(x, 2))
        kept = rpc.remote("worker1", torch.mul, args=(x, 5))
        found = [result.tolist(), str(result.device), kept.to_here().tolist()]
    rpc.shutdown()
    return found


@check("train")
def remote_calls_with_tensors_of_the_device() -> None:
    """Two workers of one GPU: arguments and results are tensors on it."""
    try:
        found, _ = dist.spawn(_serve, 2, (str(DEVICE),))
    except dist.LaunchError as error:
        raise error.__cause__ or error from None
    assert found == [[3, 3, 3], str(DEVICE), [5, 5, 5]], found


@check("train")
def compiled() -> None:
    """`torch.compile` of a DDP model and of a functional collective."""
    with one_rank():
        model = torch.compile(dist.DistributedDataParallel(small_model()), backend="aot_eager")
        same_losses(model, 1e-4)

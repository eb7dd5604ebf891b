"""LoRA on a frozen base of 4 bits, sharded: only the adapters are trained, reduced and saved.

The base of a layer is a frozen uint8 parameter, two values of 4 bits per byte, with one scale per
block of 16 values. `fully_shard` shards and gathers the bytes as they are: an eighth of float32.
They are expanded for each use and not kept: backward expands them again. Beside the base there are
two narrow trained matrices, the adapter: y = base(x) + up(down(x)).

The base's parameters must be frozen before `fully_shard`; then they have neither gradients nor
optimizer state, and nothing is sent for them in backward.

The check: one process trains adapters of the same base, expanded to float64 before training.

    dure run --nproc 2 examples/recipes/lora_quantized.py          (any number that divides 24)
"""

import tempfile

import torch
import torch.nn.functional as F
from torch import nn

import dure as dist
from dure import fsdp
from dure.checkpoint import load, save
from dure.checkpoint.state_dict import StateDictOptions, get_model_state_dict

STEPS, BATCH, WIDTH, RANK, BLOCK = 6, 24, 32, 4, 16
LEVELS = torch.linspace(-1, 1, 16, dtype=torch.double)  # QLoRA's NF4 is another such table


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight [out, in] as bytes [out, in / 2] and scales [out, in / BLOCK]."""
    blocks = weight.unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(-1)
    codes = (blocks / scales[..., None])[..., None].sub(LEVELS).abs().argmin(-1).flatten(1)
    return (codes[:, ::2] * 16 + codes[:, 1::2]).to(torch.uint8), scales


def dequantize(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the weight [out, in] that bytes and scales encode."""
    codes = torch.stack([packed // 16, packed % 16], -1).flatten(1)
    return (LEVELS[codes.int()].unflatten(1, (-1, BLOCK)) * scales[..., None]).flatten(1)


class QuantizedLinear(torch.autograd.Function):
    """y = x W^T, where backward expands W again instead of keeping it."""

    @staticmethod
    def forward(ctx, x, packed, scales):  # noqa: D102
        ctx.save_for_backward(packed, scales)
        return x @ dequantize(packed, scales).T

    @staticmethod
    def backward(ctx, gradient):  # noqa: D102
        return gradient @ dequantize(*ctx.saved_tensors), None, None


class LoraLinear(nn.Module):
    """A frozen linear layer of 4 bits, and its adapter."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        packed, scales = quantize(base.weight.detach())
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.down = nn.Parameter(torch.randn(RANK, WIDTH).double() / WIDTH)
        self.up = nn.Parameter(torch.zeros(WIDTH, RANK).double())  # at first y = base(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, width] to the same shape."""
        base = QuantizedLinear.apply(x, self.packed, self.scales)
        return torch.tanh(base + F.linear(F.linear(x, self.down), self.up))


class Expanded(LoraLinear):
    """The same layer in one process: the base is a float64 matrix, and autograd does the rest."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, width] to the same shape."""
        weight = dequantize(self.packed, self.scales) + self.up @ self.down
        return torch.tanh(F.linear(x, weight))


def build(layer: type[LoraLinear]) -> nn.Sequential:
    """Return a model of three layers, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(layer(nn.Linear(WIDTH, WIDTH).double()) for _ in range(3)))


def train(model: nn.Module, rank: int, size: int) -> list[float]:
    """Train the adapters on this rank's rows of each batch; return the losses."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    rows = torch.randn(STEPS, BATCH, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    losses = []
    for batch in rows:
        x = batch.tensor_split(size)[rank]
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()

    model = build(LoraLinear)
    for layer in model:
        fsdp.fully_shard(layer)
    fsdp.fully_shard(model)
    losses = torch.tensor(train(model, rank, size), dtype=torch.double)
    dist.all_reduce(losses, dist.ReduceOp.AVG)

    weight = torch.linspace(-1, 1, 64).double().view(2, 32)
    off = (dequantize(*quantize(weight)) - weight).abs().amax()
    assert off < 1 / 14, off  # half of the distance of two levels
    alone = build(Expanded)
    expected = torch.tensor(train(alone, 0, 1), dtype=torch.double)
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=0)
    for name, tensor in fsdp.stream_full(model):
        exact = {"rtol": 0, "atol": 0} if name.endswith("packed") else {"rtol": 1e-9, "atol": 1e-12}
        torch.testing.assert_close(tensor, alone.state_dict()[name], **exact)

    with tempfile.TemporaryDirectory() as mine:  # save the adapters, load them on a fresh base
        folders, only_trained = [mine], StateDictOptions(ignore_frozen_params=True)
        dist.broadcast_object_list(folders, src=0)
        saved = get_model_state_dict(model, options=only_trained)
        assert all(name.endswith(("down", "up")) for name in saved)
        save(saved, checkpoint_id=folders[0])
        fresh = fsdp.fully_shard(build(LoraLinear))
        load(get_model_state_dict(fresh, options=only_trained), checkpoint_id=folders[0])
        dist.barrier()  # no rank removes the folder before all have read
    x = torch.ones(1, WIDTH).double()
    with torch.no_grad():
        torch.testing.assert_close(fresh(x), alone(x), rtol=1e-9, atol=1e-12)

    if rank == 0:
        held = [(p.requires_grad, p.to_local().nbytes) for p in model.parameters()]
        frozen, trained = (sum(n for of, n in held if of is which) for which in (False, True))
        print(f"losses {losses[0]:.4f} to {losses[-1]:.4f}, those of one process")
        print(f"this rank has {frozen} bytes of the base, {trained} of adapters")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

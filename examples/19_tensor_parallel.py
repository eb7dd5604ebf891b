"""A small Llama on text, its layers divided among ranks: tensor, sequence and data parallel.

`MESH` is the one line to change. Along the axis "tp" ranks share each layer: attention heads,
hidden units and vocabulary are divided, activations between layers are sharded over the sequence,
and the loss is computed on scores that nobody gathers. Along "dp" there are replicas with other
data. The model knows nothing of it; `PLAN` says which style each layer gets.

How can one know that it is right? One process makes the same steps: the losses agree to 9 digits.

    dure run --nproc 2 examples/19_tensor_parallel.py          (any number that divides 24)
"""

import torch
import torch.nn.functional as F
from llama import LENGTH, Llama
from torch import nn

import dure as dist
from dure.data import read_python_sources
from dure.device_mesh import init_device_mesh
from dure.tensor import DTensor, Replicate, Shard
from dure.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

STEPS, BATCH = 6, 24

gather = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
PLAN = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "layers.*.norm_*": SequenceParallel(),
    "layers.*.attention": PrepareModuleInput(**gather),
    "layers.*.attention.[qkv]": ColwiseParallel(),
    "layers.*.attention.out": RowwiseParallel(output_layouts=Shard(1)),
    "layers.*.mlp": PrepareModuleInput(**gather),
    "layers.*.mlp.gate": ColwiseParallel(),
    "layers.*.mlp.up": ColwiseParallel(),
    "layers.*.mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(
        input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
    ),
}


def model() -> Llama:
    """Return the model, the same on every rank."""
    torch.manual_seed(0)
    return Llama().double()


def batches() -> list[torch.Tensor]:
    """Return windows of Python's own sources, [batch, length + 1] for each step."""
    text = read_python_sources(100_000).encode()
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(len(text) - LENGTH - 1, (STEPS, BATCH), generator=generator)
    return [torch.tensor([list(text[i : i + LENGTH + 1]) for i in row]) for row in starts.tolist()]


def loss_of(net: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    scores = net(tokens[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    dist.init_process_group()
    size = dist.get_world_size()
    tp = 2 if size % 2 == 0 else 1
    MESH = {"dp": size // tp, "tp": tp}

    mesh = init_device_mesh("cpu", tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    net = parallelize_module(model(), mesh["tp"], PLAN)
    net = dist.DistributedDataParallel(net, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    dp, replicas = mesh.get_local_rank("dp"), mesh.size("dp")

    losses: list[float] = []
    for tokens in batches():
        mine = tokens.tensor_split(replicas)[dp]
        with loss_parallel():
            loss = loss_of(net, mine)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = loss.detach().full_tensor() if isinstance(loss, DTensor) else loss.detach()
        dist.all_reduce(value, dist.ReduceOp.AVG, group=mesh.get_group("dp"))
        losses.append(value.item())

    alone = model()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=3e-3)
    for number, tokens in enumerate(batches()):
        loss = loss_of(alone, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert abs(loss.item() - losses[number]) < 1e-9 * loss.item(), (number, losses)
    if dist.get_rank() == 0:
        held = sum(p.to_local().numel() for p in net.parameters())
        whole = sum(p.numel() for p in alone.parameters())
        print(f"{MESH}: losses {losses[0]:.4f} to {losses[-1]:.4f}, those of one process")
        print(f"this rank holds {held} of {whole} parameters")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

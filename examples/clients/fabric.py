"""Lightning Fabric: DDP, and a model that FSDP2 shards; the backend is a value of the strategy.

dure run --nproc 2 examples/clients/fabric.py dure
"""

import sys

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

BACKEND = sys.argv[1] if len(sys.argv) > 1 else "gloo"


def shard(model: torch.nn.Module, mesh: torch.distributed.DeviceMesh) -> torch.nn.Module:
    for layer in model:
        fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


strategies = {
    "DDP": DDPStrategy(process_group_backend=BACKEND),
    "FSDP2": ModelParallelStrategy(
        shard, data_parallel_size=2, tensor_parallel_size=1, process_group_backend=BACKEND
    ),
}
for name, strategy in strategies.items():
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(optimizer)
    losses = []
    for batch in torch.randn(4, 2, 6, 8)[:, fabric.global_rank]:
        loss = torch.nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True))
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(fabric.all_reduce(loss.detach(), reduce_op="mean").item())
    weights = sum(full(p).double().abs().sum().item() for p in model.parameters())
    ranks = fabric.all_gather(torch.tensor(fabric.global_rank)).flatten().tolist()
    if fabric.global_rank == 0:
        print(name, "losses", *losses, "weights", weights, "ranks", *ranks)
torch.distributed.destroy_process_group()

"""A small mixture of experts on text: experts divided over one axis of the mesh, shards over both.

In each layer of the Llama of llama.py 8 experts take the place of the MLP, of which each token is
computed by 2. Along "ep" a rank has some of the experts: tokens travel to them and back. Along "dp"
ranks with the same experts divide them as `fully_shard` does; all other parameters are divided
over all ranks. The load is balanced by biases and by a loss, over the tokens of all ranks.

How can one know that it is right? One process makes the same steps: the losses agree to 9 digits.

    dure run --nproc 2 examples/24_experts.py          (any number that divides 24)
"""

import torch
import torch.nn.functional as F
from llama import HIDDEN, LENGTH, WIDTH, Llama
from torch import nn

import dure as dist
from dure.data import read_python_sources
from dure.device_mesh import DeviceMesh, init_device_mesh
from dure.fsdp import fully_shard
from dure.nn.experts import MoE, MoEArgs, balancing_loss, update_expert_bias
from dure.tensor.parallel import ExpertParallel, parallelize_module

STEPS, BATCH = 6, 24
ARGS = MoEArgs(num_experts=8, top_k=2, route_norm=True, aux_loss_coeff=1e-2, z_loss_coeff=1e-3)


def model() -> Llama:
    """Return the model, the same on every rank."""
    torch.manual_seed(0)
    net = Llama()
    for layer in net.layers:
        layer.mlp = MoE(ARGS, WIDTH, HIDDEN // 2)
    return net.double()


def batches() -> list[torch.Tensor]:
    """Return windows of Python's own sources, [batch, length + 1] for each step."""
    text = read_python_sources(100_000).encode()
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(len(text) - LENGTH - 1, (STEPS, BATCH), generator=generator)
    return [torch.tensor([list(text[i : i + LENGTH + 1]) for i in row]) for row in starts.tolist()]


def train(
    net: nn.Module, rank: int, size: int, everybody: DeviceMesh | None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Train on this rank's rows of each batch; return the losses, and the last step's load."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    losses: list[float] = []
    load: dict[str, torch.Tensor] = {}
    for tokens in batches():
        mine = tokens.tensor_split(size)[rank]
        scores = net(mine[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1), mine[:, 1:].flatten())
        loss = loss + balancing_loss(net, everybody)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        load = update_expert_bias(net, everybody)
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.double), load


def main() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    ep = 2 if size % 2 == 0 else size
    MESH = {"dp": size // ep, "ep": ep}

    mesh = init_device_mesh("cpu", tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    everybody = mesh["dp", "ep"]._flatten("data")
    net = parallelize_module(model(), mesh["ep"], {"layers.*.mlp.experts": ExpertParallel()})
    for layer in net.layers:
        fully_shard(layer.mlp.experts, mesh=mesh["dp"])
        fully_shard(layer, mesh=everybody)
    fully_shard(net, mesh=everybody)
    losses, load = train(net, rank, size, everybody)
    dist.all_reduce(losses, dist.ReduceOp.AVG)

    alone = model()
    expected, expected_load = train(alone, 0, 1, None)
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(load, expected_load)
    if rank == 0:
        held = sum(p.to_local().numel() for p in net.parameters())
        whole = sum(p.numel() for p in alone.parameters())
        print(f"{MESH}: losses {losses[0]:.4f} to {losses[-1]:.4f}, those of one process")
        print(f"tokens of each expert in the last step: {load['layers.0.mlp'].tolist()}")
        print(f"this rank trains {held} of {whole} parameters")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

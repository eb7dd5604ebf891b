"""A program for torch.distributed.tensor, in the shape of tutorials.

The imports are all that is changed for Dure (test_dtensor_program_torch.py).
"""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    zeros,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)


def basics(mesh) -> list:
    """Distribute, redistribute, compute."""
    torch.manual_seed(0)
    rows = distribute_tensor(torch.randn(9, 6).double(), mesh, [Shard(dim=0)])
    columns = distribute_tensor(torch.randn(9, 6).double(), mesh, placements=[Shard(1)])
    terms = DTensor.from_local(torch.full((3, 2), dist.get_rank() + 1.0), mesh, [Partial()])
    return [
        rows.to_local().tolist(),
        (rows + columns).full_tensor().tolist(),
        (rows.t() @ columns).redistribute(mesh, [Replicate()]).to_local().tolist(),
        terms.redistribute(placements=[Replicate()]).to_local().tolist(),
        list(zeros(5, 3, device_mesh=mesh, placements=[Shard(0)]).to_local().shape),
    ]


def layers(mesh) -> list:
    """Train a module whose rows are on the ranks."""

    def partition(name, module, device_mesh):
        for key, parameter in list(module.named_parameters(recurse=False)):
            made = distribute_tensor(parameter, device_mesh, [Shard(0)])
            module.register_parameter(key, nn.Parameter(made))

    torch.manual_seed(1)
    net = distribute_module(
        nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).double(),
        mesh,
        partition_fn=partition,
        input_fn=lambda mod, inputs, m: distribute_tensor(inputs[0], m, [Replicate()]),
        output_fn=lambda mod, out, m: out.redistribute(placements=[Replicate()]).to_local(
            grad_placements=[Replicate()]
        ),
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        loss = net(torch.ones(5, 6).double() / 3).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses + [value.full_tensor().tolist() for value in net.state_dict().values()]


def transformer(mesh) -> list:
    """Train layers under tensor, sequence and loss parallel; return losses and communication."""
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Embedding(48, 16),
        nn.LayerNorm(16),
        nn.Sequential(nn.Linear(16, 24), nn.SiLU(), nn.Linear(24, 16)),
        nn.LayerNorm(16),
        nn.Linear(16, 48),
    )
    plan = {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "1": SequenceParallel(),
        "2": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "2.0": ColwiseParallel(),
        "2.2": RowwiseParallel(output_layouts=Shard(1)),
        "3": SequenceParallel(),
        "4": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    model = parallelize_module(model.double(), mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=True)
    losses, mode = [], CommDebugMode()
    for step in range(3):
        tokens = torch.randint(48, (4, 9), generator=torch.Generator().manual_seed(step))
        with mode, loss_parallel():
            scores = model(tokens[:, :-1])
            loss = F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = loss.detach()
        losses.append((value.full_tensor() if isinstance(value, DTensor) else value).item())
    moves = ("all_gather_into_tensor", "reduce_scatter_tensor")
    counts = {str(key).rpartition(".")[2]: n for key, n in mode.get_comm_counts().items()}
    return [losses, [counts.get(name, 0) for name in moves]]


def find() -> list:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return [basics(mesh), layers(mesh), transformer(mesh)]

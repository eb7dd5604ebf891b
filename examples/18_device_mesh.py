"""A device mesh: ranks in a grid with named axes, and a group along each axis.

Two replicas of a layer see different data; within a replica, the ranks share the layer's rows. One
line says so, `MESH`; change it, and nothing else changes:

    dure run --nproc 4 examples/18_device_mesh.py           (an even number of ranks)
"""

import torch

import dure as dist
from dure.comm import functional as F
from dure.device_mesh import init_device_mesh


def main() -> None:
    dist.init_process_group()
    size = dist.get_world_size()
    replicas = 2 if size % 2 == 0 else 1
    MESH = {"dp": replicas, "tp": size // replicas}

    mesh = init_device_mesh("cpu", tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    if dist.get_rank() == size - 1:
        print(mesh)
    dp, tp = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")

    # The layer's rows are on the ranks of the axis "tp"; each replica has its own batch.
    torch.manual_seed(0)
    weight = torch.randn(8, 4)
    mine = weight.tensor_split(mesh.size("tp"))[tp].clone().requires_grad_()
    batches = torch.randn(replicas, 16, 4)
    y = batches[dp] @ mine.T

    # The loss is summed over the layer's rows (tp), then averaged over the replicas (dp).
    loss = F.all_reduce(y.square().sum(), "sum", (mesh, "tp"))
    loss = F.all_reduce(loss, "avg", (mesh, "dp"))
    y.square().sum().backward()
    gradient = F.all_reduce(mine.grad, "avg", (mesh, "dp"))

    # One process would have found the same.
    whole = weight.clone().requires_grad_()
    expected = torch.stack([(batch @ whole.T).square().sum() for batch in batches]).mean()
    expected.backward()
    assert torch.allclose(loss, expected, rtol=1e-4)
    assert torch.allclose(gradient, whole.grad.tensor_split(mesh.size("tp"))[tp], rtol=1e-4)
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.3f}; one process: {expected.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

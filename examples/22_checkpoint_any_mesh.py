"""A checkpoint for any mesh: saved by 4 ranks, training goes on with 1, 2, 3, and with 2 x 2.

    dure run --nproc 4 examples/22_checkpoint_any_mesh.py

Parameters and AdamW's state are sharded over all ranks (`fully_shard`). `async_save` copies each
rank's part and writes it while the next steps run. Other jobs, with other numbers of ranks, load
it: each rank reads the rows that it has, no more. In 2 x 2 the parameters are cut in two, and
there are two replicas. The losses of all jobs are those of the job that saved.

The optimizers of the other jobs have never stepped. `get_state_dict` makes the tensors to load
into, under the names of the plain module; `set_state_dict` gives them to the optimizer.
"""

import multiprocessing
import tempfile
from typing import Any

import torch
import torch._dynamo  # every optimizer imports it: here once, before the ranks fork
from torch import nn

import dure as dist
from dure.checkpoint import async_save, load
from dure.checkpoint.state_dict import get_state_dict, set_state_dict
from dure.device_mesh import init_device_mesh
from dure.fsdp import fully_shard

BEFORE, AFTER, BATCH = 5, 5, 24


def sharded(mesh_sizes: tuple[int, ...], seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model whose parameters are cut over the last axis of the mesh."""
    torch.manual_seed(seed)
    layers = [nn.Linear(8, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1)]
    model = nn.Sequential(*layers).double()
    names = ("replicate", "shard")[-len(mesh_sizes) :]
    mesh = init_device_mesh("cpu", mesh_sizes, mesh_dim_names=names)
    for layer in layers[::2]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Train on this rank's rows of each step's batch; return the losses of whole batches."""
    losses = []
    for step in steps:
        data = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(step)).double()
        mine = data.tensor_split(dist.get_world_size())[dist.get_rank()]
        loss = (model(mine).squeeze(1) - mine.sum(1).sin()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def job(folder: str, sizes: tuple[int, ...], rank: int, expected: list[float]) -> None:
    """Be one rank of a job of another mesh, which goes on from the checkpoint."""
    size = torch.Size(sizes).numel()
    meeting = f"file://{folder}/meeting-{'x'.join(map(str, sizes))}"
    dist.init_process_group(init_method=meeting, rank=rank, world_size=size)
    model, optimizer = sharded(sizes, seed=size)  # weights of its own
    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments, "step": 0}
    loaded = load(state, checkpoint_id=f"{folder}/saved")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    losses = train(model, optimizer, range(state["step"], BEFORE + AFTER))
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=0)
    if rank == 0:
        grid = " x ".join(map(str, sizes))
        print(f"{grid} ranks: rank 0 has read {loaded.num_bytes} bytes; the same losses")
    dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    with tempfile.TemporaryDirectory() as mine:
        folders = [mine]
        dist.broadcast_object_list(folders, src=0)
        folder = folders[0]
        model, optimizer = sharded((size,), seed=0)
        train(model, optimizer, range(BEFORE))
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": BEFORE}
        future = async_save(state, checkpoint_id=f"{folder}/saved")
        losses = train(model, optimizer, range(BEFORE, BEFORE + AFTER))  # while it is written
        future.result()
        if rank == 0:
            print(f"saved by {size} ranks; then losses {losses[0]:.6f} to {losses[-1]:.6f}")
        grids = [(1,), (2,), (3,), (2, 2)]
        for sizes in [grid for grid in grids if torch.Size(grid).numel() <= size]:
            if rank < torch.Size(sizes).numel():
                args = (folder, sizes, rank, losses)
                process = multiprocessing.get_context("fork").Process(target=job, args=args)
                process.start()
                process.join()
                assert process.exitcode == 0, f"{sizes}: it ended with {process.exitcode}"
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Resume: a run is killed in the middle, started again, and nobody can tell from its losses.

    dure run --nproc 2 examples/16_resume.py

In a first job the last rank kills itself in the middle of an epoch. A second job, new processes
with other random numbers, goes on from the newest checkpoint. A third one trains undisturbed. The
losses of all steps must be those of the undisturbed one, to the last bit. (A job is usually
started again by whoever runs `dure run`; here each rank forks the ranks of the first two jobs.)

What has to come back for that: the model, the optimizer and its schedule, the place in the epoch,
the random numbers of dropout and augmentation. `Checkpointer` saves and loads all of it by name.
"""

import multiprocessing
import os
import signal
import sys
import tempfile

import torch
import torch._dynamo  # every optimizer imports it: here once, before the ranks fork
from torch import nn

import dure as dist
from dure.checkpoint import Checkpointer

EPOCHS, SAMPLES, GLOBAL_BATCH, SAVE_EVERY, KILLED_AT = 3, 240, 24, 4, 17


class Digits:
    """Made-up data with augmentation: a point on a line, and noise that is new in each epoch."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        clean = torch.linspace(0, index / SAMPLES, 8)
        return clean + 0.05 * torch.randn(8), clean.sum()


def train(folder: str, killed_at: int = -1) -> list[float]:
    """Train from the newest checkpoint, or from the start; return the losses of all steps."""
    torch.manual_seed(dist.get_rank())  # dropout differs from rank to rank
    model = dist.DistributedDataParallel(
        nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    batch = max(1, GLOBAL_BATCH // dist.get_world_size())
    loader = dist.DataLoader(Digits(), batch, shuffle=True, num_workers=1)
    losses: list[float] = []
    run = {
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "loader": loader,
        "losses": losses,
    }
    checkpoints = Checkpointer(folder, keep=2)
    step = checkpoints.load(**run)
    if dist.get_rank() == 0 and step is not None:
        print(f"goes on after step {step}, in epoch {loader.epoch}")
    for epoch in range(loader.epoch, EPOCHS):
        loader.set_epoch(epoch)
        for x, y in loader:
            if len(losses) == killed_at and dist.get_rank() == dist.get_world_size() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = (model(x).squeeze(1) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            mean = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean)
            losses.append(mean.item())
            if len(losses) % SAVE_EVERY == 0:
                checkpoints.save(len(losses), **run)
    checkpoints.save(len(losses), **run)
    return losses


def job(folder: str, meeting: str, rank: int, size: int, killed_at: int = -1) -> list[float]:
    """Be one rank of a job of its own, whose ranks meet in the file `meeting`."""
    dist.init_process_group(init_method=f"file://{folder}/{meeting}", rank=rank, world_size=size)
    try:
        return train(f"{folder}/killed", killed_at)
    except dist.PeerLost as error:
        sys.exit(f"rank {error.peer} is gone; so rank {rank} ends too")
    finally:
        dist.destroy_process_group()


def forked_job(*args: object) -> int | None:
    """Run `job` in a process of its own; return its exit code."""
    process = multiprocessing.get_context("fork").Process(target=job, args=args)
    process.start()
    process.join()
    return process.exitcode


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    with tempfile.TemporaryDirectory() as mine:
        folders = [mine]
        dist.broadcast_object_list(folders, src=0)
        folder = folders[0]
        code = forked_job(folder, "first", rank, size, KILLED_AT)
        assert code == (-signal.SIGKILL if rank == size - 1 else 1), f"it ended with {code}"
        assert forked_job(folder, "second", rank, size) == 0

        undisturbed = train(f"{folder}/undisturbed")
        resumed: list[float] = []
        step = Checkpointer(f"{folder}/killed").load(losses=resumed)
        assert step == len(undisturbed)
        assert resumed == undisturbed, "the kill has changed the losses"
        assert undisturbed[-1] < 0.1 * undisturbed[0]
        if rank == 0:
            print(f"{step} steps, killed before step {KILLED_AT}: the same losses, bit for bit")
        dist.barrier()  # nobody removes the folder before all have read
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

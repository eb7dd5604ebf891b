"""torchdata's StatefulDataLoader, killed and resumed by other ranks: each sample exactly once.

The sampler is Dure's: its position is one number for all ranks, so the loader's state, saved beside
the model, can be loaded by another number of ranks. With torch's sampler it could not.

A job of 2 ranks is killed in the middle of an epoch, between two checkpoints; 3 ranks continue, and
are killed as well; 2 ranks finish. `seen` is saved with the rest, as a model would be: what a
killed job has seen after its last checkpoint is seen again.

python examples/clients/data_stateful_loader.py
"""

import os
import signal
import tempfile

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import dure as dist
from dure.checkpoint import Checkpointer

SAMPLES, BATCH, EPOCHS, SAVE_EVERY = 60, 2, 2, 3
JOBS = ((2, 5), (3, 17), (2, -1))  # ranks, and the step at which the last one is killed


class Numbers(torch.utils.data.Dataset):
    """Samples that are their own numbers."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return index


def train(folder: str, killed_at: int) -> list[list[int]]:
    """Be one rank of a job; return the samples of each epoch that all ranks have seen."""
    dist.init_process_group()
    sampler = dist.DistributedSampler(Numbers(), seed=7)
    loader = StatefulDataLoader(Numbers(), batch_size=BATCH, sampler=sampler, num_workers=2)
    seen: list[list[int]] = [[]]
    progress = {"epoch": 0, "step": 0}
    run = {"loader": loader, "seen": seen, "progress": progress}
    checkpoints = Checkpointer(folder, keep=2)
    checkpoints.load(**run)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks begin after step {progress['step']}", flush=True)
    for epoch in range(progress["epoch"], EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:  # workers are ahead; what counts is what the loop got
            parts: list[list[int]] = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(parts, batch.tolist())
            seen[-1] += [number for part in parts for number in part]
            progress["step"] += 1
            if progress["step"] == killed_at and dist.get_rank() == dist.get_world_size() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if progress["step"] % SAVE_EVERY == 0:
                checkpoints.save(progress["step"], **run)
        progress["epoch"] = epoch + 1
        seen.append([])
    dist.destroy_process_group()
    return seen[:-1]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for ranks, killed_at in JOBS:
            try:
                (seen, *_) = dist.spawn(train, ranks, (folder, killed_at))
            except dist.LaunchError as error:
                if "SIGKILL" not in str(error):
                    raise
    assert len(seen) == EPOCHS
    for numbers in seen:
        assert sorted(numbers) == list(range(SAMPLES)), sorted(numbers)
    assert seen[0] != seen[1], "each epoch should have its own order"
    print(f"{EPOCHS} epochs of {SAMPLES} samples over {len(JOBS)} jobs: each exactly once")


if __name__ == "__main__":
    main()

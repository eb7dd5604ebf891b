"""Hugging Face `datasets`, killed and resumed: each sample exactly once per epoch, in three ways.

- map: a `Dataset` has a length and indices, so `dure.DataLoader` resumes it, with any number of
  ranks.
- stream: an `IterableDataset` is read in one order by all ranks, and each keeps every n-th sample.
  One number, the samples consumed, is its state: for any number of ranks, and with a shuffle
  buffer. Each rank reads all samples, and a resumed job also those that it skips.
- shards: `split_dataset_by_node` gives each rank its own shards, and the dataset's own state is
  saved for each rank. As many ranks must resume it, and without a shuffle buffer, whose samples
  would be lost.

A job is killed in the middle of an epoch, between two checkpoints, twice. `seen` is saved with the
rest, as a model would be: what a killed job has seen after its last checkpoint is seen again.

python examples/clients/data_datasets.py
"""

import itertools
import os
import signal
import tempfile
from collections.abc import Iterator

from datasets import Dataset, disable_progress_bars
from datasets.distributed import split_dataset_by_node

import dure as dist
from dure.checkpoint import Checkpointer, PerRank

SAMPLES, BATCH, EPOCHS, SAVE_EVERY = 53, 2, 2, 3
JOBS = {  # of each way: ranks, and the step at which the last one is killed
    "map": ((2, 5), (3, 17), (2, -1)),
    "stream": ((2, 5), (3, 17), (2, -1)),
    "shards": ((2, 5), (2, 17), (2, -1)),
}


class Source:
    """This rank's batches of an epoch, and what has to be saved to continue.

    Attributes:
        state: Objects for `Checkpointer.save` and `load`.
    """

    def __init__(self, way: str) -> None:
        self.way, self.rank, self.size = way, dist.get_rank(), dist.get_world_size()
        self.consumed = {"samples": 0}
        dataset = Dataset.from_dict({"id": list(range(SAMPLES))})
        if way == "map":
            self.loader = dist.DataLoader(dataset, BATCH, shuffle=True, seed=7, pad=False)
            self.state = {"loader": self.loader}
            return
        stream = dataset.to_iterable_dataset(num_shards=8)
        if way == "stream":
            self.stream = stream.shuffle(seed=7, buffer_size=10)
            self.state = {"consumed": self.consumed}
        else:
            self.stream = split_dataset_by_node(stream, self.rank, self.size)
            self.state = {"stream": PerRank(self.stream)}

    def batches(self, epoch: int) -> Iterator[list[int]]:
        """Continue the epoch where it was saved, or begin it."""
        if self.way == "map":
            self.loader.set_epoch(epoch)
            yield from (batch["id"].tolist() for batch in self.loader)
            return
        self.stream.set_epoch(epoch)
        samples = iter(self.stream)
        if self.way == "stream":
            first = self.consumed["samples"] + self.rank
            samples = itertools.islice(samples, first, None, self.size)
        while batch := [sample["id"] for sample in itertools.islice(samples, BATCH)]:
            self.consumed["samples"] += BATCH * self.size
            yield batch
        self.consumed["samples"] = 0


def train(way: str, folder: str, killed_at: int) -> list[list[int]]:
    """Be one rank of a job; return the samples of each epoch that all ranks have seen."""
    disable_progress_bars()
    dist.init_process_group()
    source = Source(way)
    seen: list[list[int]] = [[]]
    progress = {"epoch": 0, "step": 0}
    run = {**source.state, "seen": seen, "progress": progress}
    checkpoints = Checkpointer(folder, keep=2)
    checkpoints.load(**run)
    if dist.get_rank() == 0:
        print(f"{way}: {dist.get_world_size()} ranks begin after step {progress['step']}")
    for epoch in range(progress["epoch"], EPOCHS):
        batches = source.batches(epoch)
        while True:  # a rank may have one batch fewer than others
            parts: list[list[int]] = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(parts, next(batches, []))
            if not any(parts):
                break
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
    for way, jobs in JOBS.items():
        with tempfile.TemporaryDirectory() as folder:
            for ranks, killed_at in jobs:
                try:
                    (seen, *_) = dist.spawn(train, ranks, (way, folder, killed_at))
                except dist.LaunchError as error:
                    if "SIGKILL" not in str(error):
                        raise
        assert len(seen) == EPOCHS
        for numbers in seen:
            assert sorted(numbers) == list(range(SAMPLES)), (way, sorted(numbers))
        print(
            f"{way}: {EPOCHS} epochs of {SAMPLES} samples over {len(jobs)} jobs: each exactly once"
        )


if __name__ == "__main__":
    main()

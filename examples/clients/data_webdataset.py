"""webdataset, killed and resumed by other ranks: each sample of tar files exactly once per epoch.

The order of an epoch is one list: the shards, permuted by the epoch's number, and within each the
samples in the order of the file. All ranks walk through it, and each decodes every n-th sample. So
one number, the samples consumed, is the state of any number of ranks. A resumed job does not open
the shards before that number: their sizes are known from when they were written.

Two jobs are killed in the middle of an epoch, between two checkpoints. `seen` is saved with the
rest, as a model would be: what a killed job has seen after its last checkpoint is seen again.

python examples/clients/data_webdataset.py
"""

import itertools
import os
import random
import signal
import tempfile
from collections.abc import Iterator
from typing import Any

import webdataset

import dure as dist
from dure.checkpoint import Checkpointer

SIZES = (9, 13, 5, 12, 14)  # of the shards
BATCH, EPOCHS, SAVE_EVERY = 2, 2, 3
JOBS = ((2, 5), (3, 17), (2, -1))  # ranks, and the step at which the last one is killed


def write_shards(folder: str) -> None:
    """Write tar files of samples that are their own numbers."""
    numbers = itertools.count()
    for shard, size in enumerate(SIZES):
        with webdataset.TarWriter(f"{folder}/{shard:04}.tar") as tar:
            for number in itertools.islice(numbers, size):
                tar.write({"__key__": f"{number:06}", "cls": number, "json": {"square": number**2}})


class Shards:
    """The samples of tar files, over all ranks, from any position of an epoch on.

    Args:
        folder: Has the files 0000.tar, 0001.tar, ...
        sizes: The number of samples of each.
    """

    def __init__(self, folder: str, sizes: tuple[int, ...]) -> None:
        self.folder, self.sizes = folder, sizes
        self.epoch = self.consumed = self.opened = 0

    def state_dict(self) -> dict[str, int]:
        """Return the position; the same on all ranks."""
        return {"epoch": self.epoch, "consumed": self.consumed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue there, with any number of ranks."""
        self.epoch, self.consumed = state["epoch"], state["consumed"]

    def batches(self) -> Iterator[list[dict[str, Any]]]:
        """Yield this rank's batches of the rest of the epoch; then the next epoch begins."""
        rank, size = dist.get_rank(), dist.get_world_size()
        order = list(range(len(self.sizes)))
        random.Random(self.epoch).shuffle(order)
        skipped = self.consumed
        while order and skipped >= self.sizes[order[0]]:
            skipped -= self.sizes[order.pop(0)]
        urls = [f"{self.folder}/{shard:04}.tar" for shard in order]
        self.opened = len(urls)
        # All ranks read all these files (no splitting by nodes or workers), undecoded.
        options = {"shardshuffle": False, "nodesplitter": None, "workersplitter": None}
        raw = webdataset.WebDataset(urls, **options) if urls else ()
        mine = itertools.islice(raw, skipped + rank, None, size)
        decode = webdataset.autodecode.Decoder([webdataset.autodecode.basichandlers])
        for first in range(self.consumed, sum(self.sizes), BATCH * size):
            self.consumed = min(first + BATCH * size, sum(self.sizes))
            yield [decode(sample) for sample in itertools.islice(mine, BATCH)]
        self.epoch, self.consumed = self.epoch + 1, 0


def train(data: str, folder: str, killed_at: int) -> tuple[list[list[int]], int]:
    """Be one rank of a job; return the samples of each epoch, and the shards opened at first."""
    dist.init_process_group()
    shards = Shards(data, SIZES)
    seen: list[list[int]] = [[] for _ in range(EPOCHS)]
    progress = {"step": 0}
    run = {"shards": shards, "seen": seen, "progress": progress}
    checkpoints = Checkpointer(folder, keep=2)
    checkpoints.load(**run)
    opened = 0
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks begin after step {progress['step']}")
    while (epoch := shards.epoch) < EPOCHS:
        for batch in shards.batches():  # as many on all ranks; the last ones may be empty
            opened = opened or shards.opened
            numbers = [sample["cls"] for sample in batch]
            assert all(sample["json"]["square"] == sample["cls"] ** 2 for sample in batch)
            parts: list[list[int]] = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(parts, numbers)
            seen[epoch] += [number for part in parts for number in part]
            progress["step"] += 1
            if progress["step"] == killed_at and dist.get_rank() == dist.get_world_size() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if progress["step"] % SAVE_EVERY == 0:
                checkpoints.save(progress["step"], **run)
    dist.destroy_process_group()
    return seen, opened


def main() -> None:
    with tempfile.TemporaryDirectory() as data, tempfile.TemporaryDirectory() as folder:
        write_shards(data)
        for ranks, killed_at in JOBS:
            try:
                ((seen, opened), *_) = dist.spawn(train, ranks, (data, folder, killed_at))
            except dist.LaunchError as error:
                if "SIGKILL" not in str(error):
                    raise
    for numbers in seen:
        assert sorted(numbers) == list(range(sum(SIZES))), sorted(numbers)
    assert seen[0] != seen[1], "each epoch should have its own order"
    assert opened < len(SIZES), "a resumed job should skip shards that are used up"
    print(f"{EPOCHS} epochs of {sum(SIZES)} samples over {len(JOBS)} jobs: each exactly once")


if __name__ == "__main__":
    main()

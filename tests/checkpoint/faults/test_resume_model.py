"""Jobs that are saved, killed, moved and sent back at random: they end as an undisturbed one does.

A *history* is a list of *stints*. In each, ranks start, load the newest checkpoint, and do what the
stint says: train, save, go back. Then they are killed or end, and the next stint starts, maybe with
another number of ranks or another wrapper. The last one trains to the end. Whatever the history,
the losses, the samples of each step and the final weights are those of a run that was never
disturbed: to the bit where all stints have the same ranks and wrapper. Histories are drawn from a
seed, which the note of a failure names.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import shutil
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DistributedSampler as TorchSampler

import dure
from dure.checkpoint import Checkpointer, PerRank, async_save, load, save
from dure.checkpoint.state_dict import get_state_dict, set_state_dict
from dure.errors import CommError
from dure.fsdp import fully_shard, strategy
from tests.comm.forked_ranks import Ranks, Slot
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.needs("engine")


SAMPLES, GLOBAL_BATCH, EPOCHS = 60, 12, 3
PER_EPOCH = SAMPLES // GLOBAL_BATCH
NUM_STEPS = EPOCHS * PER_EPOCH
RUNS = "runs"  # the folder of the checkpoints

WRAPPERS = ("plain", "ddp", "zero", "fsdp")
STORES = ("checkpointer", "sharded checkpointer", "a folder per save", "one folder")
OPTIMIZERS: dict[str, Any] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.02}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.02, "amsgrad": True}),
    "momentum": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9}),
}
LOADERS = ("own", "torch's sampler")
ACTS = ("train", "train", "save", "async_save", "resume")
ENDS = ("all killed", "one killed", "killed in a save", "exit")
MOST_RANKS = 3


@dataclass(frozen=True)
class Kind:
    """As what a job runs: stints of the same kind have the same numbers to the bit."""

    wrapper: str
    ranks: int
    option: int


@dataclass(frozen=True)
class Stint:
    """One life of the job: as what it runs, what it does, and how it ends."""

    kind: Kind
    acts: tuple[tuple[str, int], ...]
    end: str


@dataclass(frozen=True)
class History:
    """All lives of a job. The last one, whose end is not used, trains until nothing is left.

    Attributes:
        store: How it saves.
        named: Whether the functions save `get_state_dict`'s names, not the objects.
        noisy: Whether ranks draw random numbers, so that their number must stay.
        optimizer: Which.
        loader: What gives the batches.
        stints: The lives.
    """

    store: str
    named: bool
    noisy: bool
    optimizer: str
    loader: str
    stints: tuple[Stint, ...]

    @property
    def kinds(self) -> set[Kind]:
        """As what it runs."""
        return {stint.kind for stint in self.stints}


def drawn(rng: random.Random, workers: bool = False) -> History:
    """Draw a history. Workers of a killed rank end after 5 s, which makes it slow."""
    store, named = rng.choice(STORES), rng.random() < 0.5
    wrappers = WRAPPERS if named or "checkpointer" in store else ("plain", "ddp", "fsdp")

    def kind() -> Kind:
        wrapper = rng.choice(wrappers)
        ranks = 1 if wrapper == "plain" else rng.randint(1, MOST_RANKS)
        return Kind(wrapper, ranks, rng.randrange(3) if wrapper in ("zero", "fsdp") else 0)

    first, moves = kind(), rng.random() < 0.5
    stints: list[Stint] = []
    for _ in range(rng.randint(1, 4)):
        acts = [(rng.choice(ACTS), rng.randint(0, 5)) for _ in range(rng.randint(2, 8))]
        stints.append(Stint(kind() if moves else first, tuple(acts), rng.choice(ENDS)))
    loader = "own" if moves else rng.choice(LOADERS)
    loader = "workers" if workers else loader
    noisy = not moves and rng.random() < 0.7
    return History(store, named, noisy, rng.choice(list(OPTIMIZERS)), loader, tuple(stints))


class Images:
    """Samples with noise of all three generators: augmentation."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        x = torch.full((4,), index / SAMPLES, dtype=torch.float64)
        x += 0.1 * torch.randn(4, dtype=torch.float64)
        return index, x + 0.1 * random.random() + 0.1 * float(np.random.rand())


class Net(nn.Module):
    """With a layer that takes part in one step of four, first in the fourth."""

    def __init__(self, noisy: bool) -> None:
        super().__init__()
        self.first, self.late, self.last = nn.Linear(4, 7), nn.Linear(4, 7), nn.Linear(7, 1)
        self.noise = nn.Sequential(nn.Dropout(0.3), nn.BatchNorm1d(7)) if noisy else nn.Identity()
        self.uses_late = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x) + self.late(x) if self.uses_late else self.first(x)
        return self.last(self.noise(hidden.tanh()))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    unsharded: Any = tensor
    return (unsharded.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def loader_of(name: str, ranks: int, rank: int) -> Any:
    """Return a loader of this rank's share of each global batch."""
    size = GLOBAL_BATCH // ranks
    if name == "torch's sampler":
        sampler = TorchSampler(cast(Any, Images()), ranks, rank, seed=3)
        return dure.DataLoader(Images(), size, sampler=sampler, seed=3)
    workers = 1 if name == "workers" else 0
    cast(Any, multiprocessing.current_process())._config["daemon"] = False  # it may have workers
    return dure.DataLoader(Images(), size, shuffle=True, seed=3, num_workers=workers)


class Program:
    """One rank of one stint."""

    def __init__(self, history: History, number: int, rank: int) -> None:
        self.history, self.stint, self.rank = history, history.stints[number], rank
        self.last, kind = number == len(history.stints) - 1, self.stint.kind
        self.alone = kind.wrapper == "plain"
        self.log = Path(RUNS + ".log")
        torch.manual_seed(5)
        self.net = Net(history.noisy).double()
        self.averaged = Net(history.noisy).double()
        self.averaged.load_state_dict(self.net.state_dict())
        self.model: nn.Module = self.net
        made, options = OPTIMIZERS[history.optimizer]
        if kind.wrapper == "fsdp":
            with strategy("gathered") if kind.option == 2 else nullcontext():
                fully_shard(self.net.late, reshard_after_forward=kind.option != 1)
                fully_shard(self.net, reshard_after_forward=kind.option != 1)
        elif not self.alone:
            self.model = dure.DistributedDataParallel(self.net, find_unused_parameters=True)
        if kind.wrapper == "zero":
            shape = {"parameters_as_bucket_view": kind.option == 1}
            shape["host_shared_parameters"] = kind.option == 2
            made = partial(dure.ZeroRedundancyOptimizer, optimizer_class=made, **shape)
        self.optimizer: torch.optim.Optimizer = made(self.model.parameters(), **options)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 4, 0.7)
        self.loader = loader_of(history.loader, kind.ranks, rank)
        torch.manual_seed(70 + rank)
        random.seed(7)
        np.random.seed(7)
        self.run: dict[str, Any] = {"curve": [], "seen": []}
        self.mine = {"steps": torch.zeros(1), "rank": rank}
        self.batches = self._batches()
        self.checkpoints: Checkpointer | None = None
        if "checkpointer" in history.store:
            self.checkpoints = Checkpointer(RUNS, sharded="sharded" in history.store)
        self.runs = Path(RUNS)
        self.writing: list[tuple[Any, int]] = []

    # Training.

    def _batches(self) -> Iterator[Any]:
        for epoch in range(self.loader.epoch, EPOCHS):
            self.loader.set_epoch(epoch)
            yield from self.loader

    def train(self, most: int) -> bool:
        """Train for some steps; tell whether some were left."""
        for _ in range(most):
            batch = next(self.batches, None)
            if batch is None:
                return False
            self._step(*batch)
        return True

    def _step(self, numbers: torch.Tensor, x: torch.Tensor) -> None:
        self.net.uses_late = len(self.run["curve"]) % 4 == 3
        self.mine["steps"] += 1
        self.optimizer.zero_grad()
        loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        with torch.no_grad():
            for mine, value in zip(self.averaged.parameters(), self.net.parameters(), strict=True):
                mine.lerp_(whole(value), 0.1)
        told: list[Any] = [(loss.item(), numbers.tolist())]
        if not self.alone:
            told = [None] * self.stint.kind.ranks
            dure.all_gather_object(told, (loss.item(), numbers.tolist()))
        self.run["curve"].append(sum(loss for loss, _ in told) / len(told))
        self.run["seen"].append(sorted(n for _, part in told for n in part))

    # Saving.

    def objects(self) -> dict[str, Any]:
        rest = {"scheduler": self.scheduler, "loader": self.loader, "run": self.run}
        rest["ema"] = self.averaged.state_dict()
        if self.checkpoints is not None and len(self.history.kinds) == 1:
            rest["mine"] = PerRank(self.mine)
        return {"model": self.model, "optimizer": self.optimizer, **rest}

    def state(self) -> dict[str, Any]:
        state = self.objects()
        if self.history.named:
            state["model"], state["optimizer"] = get_state_dict(self.model, self.optimizer)
        if self.history.noisy:
            state[f"random-{self.rank}"] = torch.get_rng_state()
        return state

    def first(self, do: Any) -> Any:
        """Return what rank 0 gets."""
        if self.alone:
            return do()
        box = [do() if self.rank == 0 else None]
        dure.broadcast_object_list(box, src=0)
        return box[0]

    def note(self, what: str, step: int | None = None) -> None:
        """Write into a file what a killed job is to be judged by."""
        if self.rank == 0:
            with self.log.open("a") as file:
                file.write(f"{what} {len(self.run['curve']) if step is None else step}\n")

    def next_folder(self) -> Path:
        """Return where to save next."""
        name = "latest"
        if self.history.store != "one folder":
            made = self.first(lambda: len(list(self.runs.glob("*"))) if self.runs.is_dir() else 0)
            name = f"{made:04d}"
        return self.runs / name

    def save(self, _: int) -> None:
        if self.checkpoints is not None:
            self.note("begun")
            self.checkpoints.save(len(self.run["curve"]), **self.objects())
            self.note("done")
            return
        self.settle()
        folder = self.next_folder()
        self.note("begun")
        save(self.state(), checkpoint_id=folder)
        self.note("done")

    def async_save(self, _: int) -> None:
        if self.checkpoints is not None:
            return self.save(0)
        self.settle()
        folder = self.next_folder()
        self.note("begun")
        future = async_save(self.state(), checkpoint_id=folder)
        self.writing.append((future, len(self.run["curve"])))
        return None

    def settle(self) -> None:
        """Wait for the saves in the background."""
        for future, step in self.writing:
            future.result()
            self.note("done", step)
        self.writing.clear()

    # Loading.

    def saved(self) -> list[Path]:
        """List the complete checkpoints, oldest first."""
        found = [p for p in self.runs.glob("*") if (p / "manifest.json").exists()]
        return sorted(p for p in found if not p.name.startswith("."))

    def resume(self, back: int = 0) -> None:
        """Load the newest checkpoint, or an older one."""
        self.settle()
        places = self.first(self.saved)
        if not places and self.run["curve"]:
            return  # nothing to go back to
        place = places[-1 - back % len(places)] if places else None
        if self.checkpoints is not None:
            wanted = None if place is None or back == 0 else int(place.name.rpartition("-")[2])
            self.checkpoints.load(wanted, **self.objects())
        elif place is not None:
            self.loaded(place)
        self.batches = self._batches()
        self.note("back" if back else "newest")

    def loaded(self, place: Path) -> None:
        state = self.state()
        load(state, checkpoint_id=place)
        self.run = state["run"]
        if self.history.named:
            set_state_dict(
                self.model,
                self.optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
        if self.history.noisy:
            torch.set_rng_state(state[f"random-{self.rank}"])

    # What happens around it.

    def live(self) -> Any:
        """Do what the stint says; return the result of a run that has ended."""
        self.resume()
        for act, number in self.stint.acts:
            getattr(self, act)(number)
        if not self.last:
            return None
        self.settle()
        while self.train(PER_EPOCH):
            pass
        state = {k: whole(v).tolist() for k, v in self.net.state_dict().items()}
        averaged = {k: v.tolist() for k, v in self.averaged.state_dict().items()}
        if len(self.history.kinds) == 1 and self.checkpoints is not None:
            assert self.mine == {"steps": NUM_STEPS, "rank": self.rank}
        return self.run, (state, averaged, self.scheduler.get_last_lr())


def live(slot: Slot, home: str, history: History, number: int) -> Any:
    """Be one rank of a stint; return the result of the last one, of others nothing."""
    os.chdir(home)
    stint, last = history.stints[number], number == len(history.stints) - 1
    group = stint.kind.wrapper != "plain"
    if group:
        dure.init_process_group(
            "shm", slot.url, timedelta(seconds=PATIENCE_S), world_size=slot.size, rank=slot.rank
        )
    try:
        program = Program(history, number, slot.rank)
        result = program.live()
        if not last and stint.end == "one killed" and slot.rank != slot.size - 1:
            dure.barrier()  # until the other's death is seen
        if not last and stint.end == "killed in a save":
            if slot.rank == len(stint.acts) % slot.size:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process wherever it is
                signal.setitimer(signal.ITIMER_REAL, 0.0002 + 0.003 * len(stint.acts))
            program.async_save(0)
            program.settle()
    except CommError:
        if last or "killed" not in stint.end:
            raise
    if last or stint.end == "exit":
        if group:
            dure.destroy_process_group()
        if last:
            return result
        threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does at its end
    os.kill(os.getpid(), signal.SIGKILL)
    return None


SEEDS = (298, 425, 2389, 178, 6, 13, 23)
"""They have every wrapper, store, optimizer, loader and act, and resume where it matters."""


class Jobs:
    """Runs histories, and keeps the results of undisturbed runs."""

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self._ranks, self._folder = ranks, folder
        self._numbers = itertools.count()
        self._undisturbed: dict[Any, Any] = {}

    def check(self, history: History) -> None:
        """Run a history; compare what it ends with, and what each stint began with."""
        ended = self._run(history)
        kind = history.stints[-1].kind if len(history.kinds) == 1 else Kind("plain", 1, 0)
        key = kind, history.noisy, history.optimizer
        if key not in self._undisturbed:
            alone = (Stint(kind, (), "exit"),)
            self._undisturbed[key] = self._run(History(STORES[0], False, *key[1:], "own", alone))
        run, state = self._undisturbed[key]
        seen = run["seen"]
        for epoch in range(0, NUM_STEPS, PER_EPOCH):
            steps = seen[epoch : epoch + PER_EPOCH]
            assert sorted(itertools.chain(*steps)) == list(range(SAMPLES))
        assert ended[0]["seen"] == seen
        if len(history.kinds) == 1:
            assert ended[0]["curve"] == run["curve"]
            assert ended[1] == state
        else:  # sums of gradients have another order
            found, wanted = (ended[0]["curve"], ended[1]), (run["curve"], state)
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)

    def _run(self, history: History) -> Any:
        home = self._folder / f"home{next(self._numbers)}"
        home.mkdir()
        results: list[Any] = []
        for number, stint in enumerate(history.stints):
            results = self._ranks.run(live, stint.kind.ranks, str(home), history, number)
        check_log((home / f"{RUNS}.log").read_text().splitlines())
        assert all(result[0] == results[0][0] for result in results)
        shutil.rmtree(home)
        return results[0]


def check_log(lines: list[str]) -> None:
    """Check that each load of the newest is of the save that ended last, or of one begun since."""
    allowed = [0]
    for line in lines:
        what, step = line.split(" ")
        if what == "begun":
            allowed.append(int(step))
        elif what == "newest":
            assert int(step) in allowed, lines
        if what in ("done", "newest"):
            allowed = [int(step)]


def check_histories(tmp_path: Path, seeds: Iterable[int], with_workers: bool = False) -> None:
    with Ranks(MOST_RANKS, tmp_path) as ranks:
        jobs = Jobs(ranks, tmp_path)
        for seed in seeds:
            history = drawn(random.Random(seed), workers=with_workers and seed % 10 == 0)
            try:
                jobs.check(history)
            except BaseException as e:
                e.add_note(f"seed {seed}: {history}")
                raise


def test_jobs_of_drawn_histories_end_as_undisturbed_ones(tmp_path):
    check_histories(tmp_path, SEEDS)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_jobs_of_drawn_histories_end_as_undisturbed_ones(tmp_path):
    first = random.SystemRandom().randrange(1 << 30)
    check_histories(tmp_path, range(first, first + 500), with_workers=True)

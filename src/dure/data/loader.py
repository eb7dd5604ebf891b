"""A DataLoader that resumes exactly in the middle of an epoch, however far workers are ahead.

torch's DataLoader does the loading: workers, prefetching, pinned memory, collating. This one keeps
two books around it.

*Position.* Workers ask the sampler for indices long before their batches are trained on, so the
sampler's own count runs ahead. The loader counts a batch when it is *delivered*: handed to the
loop. The state is ``start + delivered * batch_size * n`` samples of the epoch's order, which is the
same number on all ranks and means the same to any number of ranks, batch size or workers
(`sampler`). If ranks have delivered different numbers of batches, or with another sampler, each has
a position of its own (`own_position`). A `Checkpointer` saves those of all ranks.

*Randomness.* An augmentation draws random numbers in a worker. Which worker that is, and how much
it has drawn before, is another one after a resume. So the generators (torch, `random`, numpy) are
seeded again for each sample, with a number made of the seed, the epoch and the sample's index: a
sample's augmentation is a function of those three alone. Without workers the samples are made in
the training process, whose own generators are put back after each batch. The indices take the seed
with them to the workers, so persistent workers learn of a new epoch too. Samples of a list, a
tuple, a range, a tensor, an array and a `TensorDataset` are made without random numbers, so no
generator is seeded for them; workers seed theirs once per batch, for a `collate_fn` that draws.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np
import torch
from torch.utils import data as torch_data

from dure import env
from dure.data.sampler import LOADED, SET, DistributedSampler, check_version, moved
from dure.errors import UsageError

__all__ = ["DataLoader"]

T = TypeVar("T")
_DRAW_NOTHING = (list, tuple, range, torch.Tensor, np.ndarray, torch_data.TensorDataset)
"""Datasets (of exactly these types) that make each sample without random numbers."""
_MIX = 0x9E3779B97F4A7C15
"""An odd constant that spreads neighbouring numbers over 64 bits."""


class DataLoader(Generic[T]):
    """torch's DataLoader over this rank's share, with ``state_dict`` and ``load_state_dict``.

    Without a sampler it makes a `DistributedSampler`: each rank of the world gets its share. Call
    `set_epoch` before each epoch. Everything else that torch's DataLoader takes and has
    (``num_workers``, ``persistent_workers``, ``pin_memory``, ``collate_fn``, ...) is handed on.

    Args:
        dataset: With a length and an index. Its ``__getitems__`` is used if it has one.
        batch_size: Samples a rank and step; None: no batches, as torch.
        shuffle: As torch; a new order each epoch.
        sampler: Gives the indices, in place of `shuffle`. One that is not Dure's
            is resumed by skipping, so its order must depend on nothing but ``set_epoch``.
        batch_sampler: Gives lists of indices, in place of all of the above.
        drop_last: Leave out the samples that do not fill a batch on every rank.
        pad: False: no sample twice; ranks may have one sample fewer, and so one batch fewer (see
            `dure.Join`).
        **options: Other arguments of torch's DataLoader, and ``seed``, of order and augmentation.

    Raises:
        UsageError: Arguments that exclude each other; a dataset without a length; a sampler whose
            order cannot be repeated.

    Cost:
        Seeding takes about 20 us a sample, in the workers if there are any; nothing for a list, a
        tensor, an array or torch's `TensorDataset`, nor for a `Subset` of these.

    Example:
        ```python
        rows = torch.utils.data.TensorDataset(torch.arange(8.0))
        loader = dist.DataLoader(rows, batch_size=2, shuffle=True)
        for epoch in range(loader.epoch, 2):
            loader.set_epoch(epoch)
            for (batch,) in loader:
                assert batch.shape == (2,)  # 2 batches on each of 2 ranks
        ```
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[list[Any]] | None = None,
        drop_last: bool = False,
        pad: bool = True,
        **options: Any,
    ) -> None:
        self.dataset, self.seed = dataset, int(options.pop("seed", 0))
        if isinstance(dataset, torch_data.IterableDataset) or not hasattr(dataset, "__len__"):
            raise _unfit("a dataset without indices", "Use torch's DataLoader, or give it indices.")
        own = [v for v in (shuffle or None, sampler, batch_sampler) if v is not None]
        grouped = batch_sampler is not None and (drop_last or batch_size not in (None, 1))
        if len(own) > 1 or grouped:
            raise _unfit(
                "shuffle, sampler and batch_sampler together, or batch_sampler with batch_size or "
                "drop_last",
                "Give one of them.",
            )
        if sampler is None and batch_sampler is None:
            n, rank = _replicas()
            sampler = DistributedSampler(
                dataset, n, rank, bool(shuffle), self.seed, drop_last=drop_last, pad=pad
            )
        if batch_sampler is None and batch_size is not None:
            batch_sampler = torch_data.BatchSampler(cast(Any, sampler), batch_size, drop_last)
        self.sampler: Any = getattr(batch_sampler, "sampler", sampler)
        self._source: Any = sampler if batch_sampler is None else batch_sampler
        self.batch_sampler, self.drop_last = batch_sampler, drop_last
        self.batch_size: int | None = getattr(batch_sampler, "batch_size", None)
        _refuse_orders_that_cannot_be_repeated(self._source)
        self._position = _Position(self.sampler, self._source, self.batch_size or 1, dataset)
        plan = _Plan(self._position, self.seed)
        self._loader = torch_data.DataLoader(
            cast(Any, _Seeded(dataset)),
            batch_size=None,
            sampler=cast(Any, plan),
            collate_fn=_Collate(batch_sampler is not None, options.pop("collate_fn", None)),
            generator=options.pop("generator", None) or torch.Generator().manual_seed(self.seed),
            **options,
        )

    def __len__(self) -> int:
        """Return how many batches the pass at hand (begun, or about to begin) gives this rank."""
        return self._position.num_batches()

    def __iter__(self) -> Iterator[T]:
        """Begin a pass: from the loaded position the first time, else from the epoch's start.

        Raises:
            UsageError: At the next batch, if the position was loaded, or the epoch changed, during
                the pass: its batches would not be counted any more.
        """
        walk = self._position.begin()
        for batch in self._loader:
            if walk.replaced:
                raise moved(walk.replaced)
            walk.delivered += 1
            yield cast(T, batch)
        if walk.replaced == LOADED:
            raise moved(walk.replaced)
        walk.ended = True

    def __getattr__(self, name: str) -> Any:
        """Look up what is torch's: `num_workers`, `pin_memory`, `collate_fn`, ..."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    @property
    def epoch(self) -> int:
        """The epoch that was set or loaded last."""
        return self._position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; a new one begins at its start, the same one continues."""
        if self._source is not self.sampler and hasattr(self._source, "set_epoch"):
            self._source.set_epoch(epoch)
        self._position.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where the job is: after the batch delivered last. The same on all ranks."""
        return self._position.state()

    def own_position(self) -> dict[str, Any]:
        """Return where this rank is. It differs from the other ranks' if they are not in step."""
        return self._position.own()

    def state_at(
        self, state: Mapping[str, Any], positions: Sequence[Mapping[str, Any]], rank: int, size: int
    ) -> Mapping[str, Any]:
        """Return the state that this rank has to load.

        Args:
            state: What `state_dict` returned on one rank.
            positions: What `own_position` returned on each rank.
            rank: This rank, among those that load.
            size: How many ranks load.

        Raises:
            UsageError: The ranks were at different positions, and their number is another now; or
                the state is of another order.
        """
        return self._position.state_at(state, positions, rank, size)

    def rejoin(self) -> None:
        """Take this rank's share in the present world (`DistributedSampler.rejoin`)."""
        if isinstance(self.sampler, DistributedSampler):
            self.sampler.rejoin()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; ranks, batch size and workers may differ.

        With a sampler other than `DistributedSampler` only the workers may. A running pass ends:
        start a new one.

        Raises:
            UsageError: The state is of another order, or lacks a field. Nothing is changed.
        """
        self._position.load(state)


@dataclass(slots=True)
class _Walk:
    """One pass: batches skipped before it, and delivered by it."""

    skipped: int = 0
    delivered: int = 0
    begun: bool = False
    ended: bool = False
    replaced: str = ""
    """What changed the position during the pass, if anything did."""


class _Steerable(Protocol):
    def set_epoch(self, epoch: int) -> None: ...


class _Position:
    """Where the job is in its epoch.

    Of a `DistributedSampler` that is a number of samples, kept in the sampler's own terms. Of any
    other order it is a number of batches, which a resumed pass skips. The epoch is the sampler's:
    programs written for torch's loader call its ``set_epoch``, not the loader's.
    """

    def __init__(self, sampler: Any, source: Any, batch_size: int, dataset: Sized) -> None:
        self._epoch = 0
        self.walk = _Walk()
        self._sampler, self._source, self._batch_size = sampler, source, batch_size
        self._dataset = dataset
        self._exact = sampler if isinstance(sampler, DistributedSampler) else None
        if self._exact is not None and source is not sampler:
            plain = type(source) is torch_data.BatchSampler
            self._exact = self._exact if plain else None  # another grouping: positions are its own

    @property
    def epoch(self) -> int:
        self._follow()
        return self._epoch

    def _follow(self) -> None:
        """Go to the sampler's epoch, if it was set there."""
        epoch = getattr(self._sampler, "epoch", self._epoch)
        if epoch != self._epoch and hasattr(self._sampler, "set_epoch"):
            self._move(epoch, _Walk(), SET)

    def _move(self, epoch: int, walk: _Walk, why: str) -> None:
        """Change the position, and mark a running pass as replaced."""
        self.walk.replaced = why
        self._epoch, self.walk = epoch, walk

    def begin(self) -> _Walk:
        self._follow()
        if self.walk.begun:
            self.walk = _Walk()
        self.walk.begun = True
        return self.walk

    def indices(self) -> Iterator[Any]:
        """Yield what is left of the pass: lists of indices, or single ones."""
        return itertools.islice(iter(self._source), self.walk.skipped, None)

    def num_batches(self) -> int:
        """Count the batches of the pass at hand."""
        self._follow()
        if self._exact is None:
            total = len(cast(Sized, self._source))
            return total if self.walk.ended else max(0, total - self.walk.skipped)
        share = self._exact.share(0 if self.walk.ended else self._exact.start)
        if getattr(self._source, "drop_last", False) and self._source is not self._sampler:
            return share // self._batch_size
        return -(-share // self._batch_size)

    def set_epoch(self, epoch: int) -> None:
        self._follow()
        if hasattr(self._sampler, "set_epoch"):
            cast(_Steerable, self._sampler).set_epoch(epoch)
        if epoch != self._epoch:
            self._move(epoch, _Walk(), SET)

    def state(self) -> dict[str, Any]:
        self._follow()
        walk = self.walk
        if self._exact is not None:
            taken = walk.delivered * self._batch_size * self._exact.num_replicas
            at = len(self._exact.dataset) if walk.ended else self._exact.start + taken
            return {"sampler": self._exact.state_dict(at)}
        return {
            "epoch": self._epoch,
            "batches": walk.skipped + walk.delivered,
            "batch_size": self._batch_size,
            "order": self._order(),
        }

    def _order(self) -> dict[str, Any]:
        """Return what the order depends on besides the epoch, as far as this can be found out."""
        found: dict[str, Any] = {"kinds": [], "length": len(self._dataset)}
        for sampler in _chain(self._source):
            found["kinds"].append(type(sampler).__qualname__)
            for name in ("num_replicas", "seed", "shuffle", "drop_last"):
                value = getattr(sampler, name, None)
                if isinstance(value, bool | int):
                    found.setdefault(name, value)
        if "num_replicas" not in found:
            found["num_replicas"] = _world_size()
        return found

    def own(self) -> dict[str, Any]:
        state = self.state()
        if self._exact is None:
            return state
        taken = self.walk.delivered * self._batch_size
        left = 0 if self.walk.ended else max(0, self._exact.share(self._exact.start) - taken)
        at = {key: state["sampler"][key] for key in ("epoch", "consumed")}
        return {"replica": self._exact.rank, **at, "left": left}

    def state_at(
        self, state: Mapping[str, Any], positions: Sequence[Mapping[str, Any]], rank: int, size: int
    ) -> Mapping[str, Any]:
        if self._exact is not None:
            return self._exact_state_at(self._exact, state, positions)
        if len(positions) == size:
            state = positions[rank]
        elif any(other != positions[0] for other in positions):
            raise _not_in_step(f"{len(positions)} ranks saved it, {size} load it")
        self._check(state)
        return state

    def _exact_state_at(
        self,
        sampler: DistributedSampler,
        state: Mapping[str, Any],
        positions: Sequence[Mapping[str, Any]],
    ) -> Mapping[str, Any]:
        """Return a state whose position leaves this rank the samples that it had left.

        If all ranks have the samples left that they would have at one position of one epoch's
        order, that is the position of any number of ranks.
        """
        self._check(state)
        saved = state["sampler"]
        if "consumed" not in saved:  # a sampler that has a state of another kind
            return state
        sampler.check_state(saved)
        by_replica = {int(p["replica"]): p for p in positions}
        found = {_at(p, saved) for p in positions}
        if len(found) == 1:
            return state
        epochs = {epoch for epoch, _ in found}
        at = None
        if len(by_replica) == sampler.num_replicas and sampler.rank in by_replica:
            at = _at(by_replica[sampler.rank], saved)
        elif len(epochs) == 1:
            places = {consumed for _, consumed in found}
            prefix = _prefix_of(by_replica, places, len(sampler.dataset), sampler)
            at = None if prefix is None else (*epochs, prefix)
        if at is None:
            (first, low), (last, high) = min(found), max(found)
            seen = f"{len(by_replica)} ranks, from epoch {first}, sample {low}"
            seen += f" to epoch {last}, sample {high}"
            raise _not_in_step(f"{seen}; here {sampler.num_replicas} ranks")
        epoch, consumed = at
        return {**state, "sampler": {**saved, "epoch": epoch, "consumed": consumed}}

    def _check(self, state: Mapping[str, Any]) -> None:
        """Raise UsageError if a state is not of this order, or of a newer format."""
        check_version(state)
        if self._exact is not None:
            own: dict[str, Any] = {"sampler": None}
        else:
            own = {"epoch": None, "batches": None, "batch_size": self._batch_size}
            own["order"] = self._order()
        seen = [f"there is no {key!r} in the state" for key in own if key not in state]
        if self._exact is None and not seen:
            there = {**state["order"], "batch_size": state["batch_size"]}
            here = {**own["order"], "batch_size": self._batch_size}
            seen = [
                f"{key} was {there.get(key)!r}, here {here.get(key)!r}"
                for key in dict.fromkeys((*here, *there))
                if there.get(key) != here.get(key)
            ]
        if seen:
            raise UsageError(
                "the state is of another order than that of this loader",
                seen="; ".join(seen),
                fix="Resume with the sampler, dataset, batch size and number of ranks of the saved "
                "job. With dure.DistributedSampler and torch's BatchSampler the last two may "
                "change.",
            )

    def load(self, state: Mapping[str, Any]) -> None:
        self._check(state)
        if self._exact is not None:
            self._exact.load_state_dict(state["sampler"])
            self._move(self._exact.epoch, _Walk(), LOADED)
            return
        running = self.walk
        self.set_epoch(int(state["epoch"]))
        self.walk, running.replaced = _Walk(skipped=int(state["batches"])), LOADED


def _at(position: Mapping[str, Any], saved: Mapping[str, Any]) -> tuple[int, int]:
    """Return the epoch and the samples consumed; older checkpoints have one epoch, rank 0's."""
    return int(position.get("epoch", saved["epoch"])), int(position["consumed"])


def _prefix_of(
    by_replica: Mapping[int, Mapping[str, Any]],
    found: set[int],
    length: int,
    sampler: DistributedSampler,
) -> int | None:
    """Return the position at which each replica has as many samples left as it had; None: none."""
    saved = DistributedSampler(
        sampler.dataset,
        len(by_replica),
        0,
        drop_last=sampler.drop_last,
        pad=sampler.pad,
    )
    for at in sorted({*found, length}):
        if all(saved.share(at, r) == int(p["left"]) for r, p in by_replica.items()):
            return at
    return None


def _not_in_step(seen: str) -> UsageError:
    return UsageError(
        "the ranks were at different positions in the data, which only as many ranks can resume",
        seen=seen,
        fix="Resume with the number of ranks of the saved job, or start at the next epoch: leave "
        "the loader out, and call set_epoch.",
    )


@dataclass(frozen=True, slots=True)
class _Draw:
    """What travels to a worker: one index, or a list of them, and the epoch's seed."""

    indices: Any
    seed: int


class _Plan:
    """The order as torch's loader sees it: each item already a batch, with the epoch's seed.

    Threads:
        Read by the training process only, also with workers.
    """

    def __init__(self, position: _Position, seed: int) -> None:
        self._position, self._seed = position, seed

    def __len__(self) -> int:
        return self._position.num_batches()

    def __iter__(self) -> Iterator[_Draw]:
        seed = _digest(f"{self._seed}/{self._position.epoch}")
        for indices in self._position.indices():
            yield _Draw(indices, seed)


class _Seeded:
    """The dataset as torch's loader sees it: makes each sample under a seed of its own."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = inner = dataset
        draws = False
        while isinstance(inner, torch_data.Subset):  # it has __getitems__, for any dataset inside
            draws = draws or type(inner) is not torch_data.Subset
            inner = cast(Any, inner).dataset
        self._together = hasattr(inner, "__getitems__")
        self._draws = draws or type(inner) not in _DRAW_NOTHING

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, draw: _Draw) -> Any:
        if torch_data.get_worker_info() is not None or not self._draws:
            return self._make(draw)
        kept = torch.get_rng_state(), random.getstate(), np.random.get_state()
        try:
            return self._make(draw)
        finally:
            torch.set_rng_state(kept[0])
            random.setstate(kept[1])
            np.random.set_state(kept[2])

    def _make(self, draw: _Draw) -> Any:
        if not self._draws:
            return self._look_up(draw)
        if not isinstance(draw.indices, list):
            return self._one(draw.indices, draw.seed)
        indices = cast(list[Any], draw.indices)
        many = getattr(self._dataset, "__getitems__", None)
        if many is None or not self._together:
            return [self._one(index, draw.seed) for index in indices]
        _sow(draw.seed, indices[0] if indices else 0)
        return many(indices)

    def _look_up(self, draw: _Draw) -> Any:
        """Return samples whose making draws no random numbers."""
        batch = isinstance(draw.indices, list)
        indices = cast(list[Any], draw.indices) if batch else [draw.indices]
        if torch_data.get_worker_info() is not None:
            _sow(draw.seed, indices[-1] if indices else 0)
        samples = [self._dataset[index] for index in indices]
        return samples if batch else samples[0]

    def _one(self, index: Any, seed: int) -> Any:
        _sow(seed, index)
        return self._dataset[index]


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _sow(seed: int, index: Any) -> None:
    """Seed this process's generators for one sample."""
    number = index if isinstance(index, int) else _digest(repr(index))
    mixed = (seed ^ (number + 1) * _MIX) & (2**63 - 1)
    torch.default_generator.manual_seed(mixed)  # torch.manual_seed would seed accelerators too
    random.seed(mixed)
    np.random.seed([mixed & 0xFFFFFFFF, mixed >> 32])


class _Collate:
    """torch's collating, chosen here because torch's loader takes items for complete batches."""

    def __init__(self, batched: bool, given: Any) -> None:
        default = torch_data.default_collate if batched else torch_data.default_convert
        self._collate = given or default

    def __call__(self, samples: Any) -> Any:
        return self._collate(samples)


def _replicas() -> tuple[int | None, int | None]:
    """Return 1 and 0 in a program of one process that has no group; else the world's, as None."""
    # lazy: data can be split and resumed without the communication layer
    from dure.comm.queries import is_initialized

    alone = not is_initialized() and _world_size() == 1
    alone = alone and not env.flag("DURE_ELASTIC")  # there, others may come
    return (1, 0) if alone else (None, None)


def _world_size() -> int:
    """Return the number of ranks of the job, also before there is a group."""
    # lazy: data can be split and resumed without the communication layer
    from dure.comm.queries import get_world_size, is_initialized

    return get_world_size() if is_initialized() else env.integer("WORLD_SIZE", 1) or 1


def _chain(source: Any) -> Iterator[Any]:
    """Yield a sampler, and those that it draws from."""
    seen: list[Any] = []
    while source is not None and all(source is not one for one in seen):
        yield source
        seen.append(source)
        inner = getattr(source, "batch_sampler", None)
        source = getattr(source, "sampler", None) if inner is None else inner


def _refuse_orders_that_cannot_be_repeated(source: Any) -> None:
    random_kinds = (torch_data.RandomSampler, torch_data.WeightedRandomSampler)
    for sampler in _chain(source):
        if isinstance(sampler, (*random_kinds, torch_data.SubsetRandomSampler)):
            raise _unfit(
                f"a {type(sampler).__name__}, whose order cannot be repeated",
                "Use shuffle=True, or a sampler whose order depends on set_epoch alone.",
            )


def _unfit(seen: str, fix: str) -> UsageError:
    return UsageError("the loader could not resume exactly", seen=seen, fix=fix)

"""Which rank sees which sample, in which order, and how to continue in the middle of an epoch.

An epoch has one *order*: a permutation of the samples made from ``seed + epoch`` (or 0, 1, 2, ...
without shuffling), the same on all ranks. With n ranks, rank r takes the order's places
r, r + n, r + 2n, ... So after any step in which every rank took b samples, the consumed samples
are a *prefix* of the order, for any n. That is why one number, the length of that prefix, is
enough to resume: m ranks that start at place `consumed` take consumed + r, consumed + r + m, ...
and every sample is seen exactly once over the epoch, also where m differs from n.

If the ranks do not divide what is left, there are three ways to end an epoch:

    pad        the order repeats its beginning: up to n - 1 samples are seen twice
    drop_last  the order is cut: up to n - 1 samples are not seen
    pad=False  neither: the first ranks take one sample more than the others, every sample is seen
               exactly once, and ranks may end a step apart, which is what `dure.Join` is for

Order, padding and cutting are those of torch.utils.data.DistributedSampler for equal arguments.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch.utils.data import Sampler

from dure import env
from dure.errors import UsageError, UsageWarning
from dure.trace.plain_files import release_that_reads

__all__ = ["LOADED", "SET", "VERSION", "DistributedSampler", "check_version", "moved"]


DATA_AXES = frozenset(
    {"data", "dp", "ddp", "fsdp", "dp_replicate", "dp_shard", "hsdp", "replicate", "shard"}
)
"""Names of mesh axes along which ranks see different samples."""


LOADED, SET = "load_state_dict", "set_epoch"
"""What changes the position during a pass."""
VERSION = 1
"""Of the states of samplers and loaders. The first ones had no number."""


class HasAxes(Protocol):
    """What a mesh is to a sampler."""

    @property
    def ndim(self) -> int:
        """Number of axes."""
        ...

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """Name of each axis."""
        ...

    def size(self, mesh_dim: int | None = None) -> int:
        """Return the number of ranks along an axis."""
        ...

    def get_local_rank(self, mesh_dim: int | None = None) -> int:
        """Return this rank's index on an axis."""
        ...


@dataclass(slots=True)
class _SamplerPass:
    """One run through an epoch's order, which may begin in its middle."""

    start: int
    taken: int = 0
    """Samples this rank has taken since `start`."""
    begun: bool = False
    ended: bool = False
    replaced: str = ""
    """What changed the position during the pass, if anything did."""


class DistributedSampler(Sampler[int]):
    """Gives each rank its share of the samples, in an order that changes with the epoch.

    Call `set_epoch` before each epoch, or every epoch has the same order (a sampler that shuffles
    warns once, on rank 0). The length is that of this rank's share of the pass: after
    `load_state_dict`, of what is left.

    Args:
        dataset: Anything with a length.
        num_replicas: How many ranks share the samples; None takes the world's size.
        rank: This one's number among them; None takes this process's rank.
        shuffle: Whether to permute the samples again each epoch.
        seed: Of the permutation; the same on all ranks.
        drop_last: Drop the tail that the ranks do not divide, instead of padding.
        pad: Repeat the first samples where the ranks do not divide the rest; False: ranks may
            have one sample fewer than others. Without meaning under `drop_last`.
        mesh: In place of `num_replicas` and `rank`: ranks with the same index on its data axes see
            the same samples. These are the axis that it has, if it is one, or those that are called
            data, dp, ddp, fsdp, hsdp, replicate, shard, dp_replicate or dp_shard.

    Raises:
        UsageError: `num_replicas` is not positive, or `rank` is not within it; no axis of the mesh
            is known to be one of data.

    Cost:
        No communication. With `shuffle` each rank makes the complete order, 8 bytes per sample, at
        the start of an epoch, and holds a list of its share.

    Example:
        ```python
        rows = torch.utils.data.TensorDataset(torch.arange(8.0))
        sampler = dist.DistributedSampler(rows)
        loader = torch.utils.data.DataLoader(rows, batch_size=2, sampler=sampler)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            assert sum(len(batch) for (batch,) in loader) == 4  # half of 8, on 2 ranks
        ```
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        pad: bool = True,
        mesh: HasAxes | None = None,
    ) -> None:
        if mesh is not None:
            if num_replicas is not None or rank is not None:
                raise UsageError("mesh replaces num_replicas and rank: give only one of them")
            num_replicas, rank = _place_in_mesh(mesh)
        self._of_world = num_replicas is None and rank is None
        if num_replicas is None or rank is None:
            world_size, world_rank = _place_in_world()
            num_replicas = world_size if num_replicas is None else num_replicas
            rank = world_rank if rank is None else rank
        if not 0 <= rank < num_replicas:
            raise UsageError(
                "a sampler's rank must lie within its replicas",
                seen=f"rank {rank}, num_replicas {num_replicas}",
                fix=f"Ranks count from 0 to {max(0, num_replicas - 1)}.",
            )
        self.dataset, self.num_replicas, self.rank = dataset, num_replicas, rank
        self.shuffle, self.seed, self.drop_last, self.pad = shuffle, seed, drop_last, pad
        self.epoch = 0
        self._warned = False
        self._pass = _SamplerPass(start=0)

    def rejoin(self) -> None:
        """Take this rank's share in the present world, if a world gave it the old one.

        For groups that change (`dure.elastic`): call it before `load_state_dict`.
        """
        if self._of_world:
            self.num_replicas, self.rank = _place_in_world()

    @property
    def num_samples(self) -> int:
        """Samples this rank takes in an epoch: as many as the others, unless ``pad=False``."""
        return self.share(0)

    @property
    def total_size(self) -> int:
        """Samples all ranks take in an epoch, padding included."""
        if self.pad or self.drop_last:
            return self.num_samples * self.num_replicas
        return len(self.dataset)

    def __len__(self) -> int:
        """Return how many samples the pass at hand (begun, or about to begin) gives this rank."""
        return self.share(0 if self._pass.ended else self._pass.start)

    def __iter__(self) -> Iterator[int]:
        """Begin a pass: from the loaded position the first time, else from the epoch's start."""
        if self._pass.begun:
            if self._pass.ended:
                self._warn_of_a_forgotten_epoch()
            self._pass = _SamplerPass(start=0)
        self._pass.begun = True
        return self._walk(self._pass)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch's order; a new epoch begins at its start, the same one continues."""
        if epoch != self.epoch:
            self._move(epoch, 0, SET)

    def _move(self, epoch: int, start: int, why: str) -> None:
        """Change the position, and mark a running pass as replaced."""
        self._pass.replaced = why
        self.epoch, self._pass = epoch, _SamplerPass(start)

    def state_dict(self, consumed: int | None = None) -> dict[str, int | bool]:
        """Return where the job is, to be saved with a checkpoint; the same on all ranks.

        Args:
            consumed: Samples of this epoch that the job, all ranks together, has trained on. None
                counts what this sampler handed out, which is the same where the ranks are in step
                and nothing is read ahead (with ``pad=False``, in an epoch's last step: rank 0's).
                A loader with workers reads ahead: `dure.data.DataLoader` counts what it
                delivered; with torch's, give ``steps * global batch size``.

        Raises:
            UsageError: `consumed` is negative.
        """
        at = self.start + self._pass.taken * self.num_replicas
        if self._pass.ended and not self.drop_last:
            at = len(self.dataset)  # with pad=False a rank may end one sample early
        return {
            "epoch": self.epoch,
            "consumed": min(_whole(at if consumed is None else consumed), len(self.dataset)),
            "seed": self.seed,
            "shuffle": self.shuffle,
            "length": len(self.dataset),
        }

    def load_state_dict(self, state: Mapping[str, int | bool]) -> None:
        """Continue where `state_dict` was taken; the number of ranks may differ.

        The next pass yields the rest of the epoch, and `set_epoch` with the same epoch keeps that;
        later passes are complete. A running pass raises `UsageError` at its next index: start a new
        one.

        Raises:
            UsageError: The state is of another order (dataset length, seed or shuffle differ),
                lacks a field, or was made by a newer release. Nothing is changed.
        """
        self.check_state(state)
        start = min(_whole(int(state["consumed"])), len(self.dataset))
        self._move(int(state["epoch"]), start, LOADED)

    def check_state(self, state: Mapping[str, int | bool]) -> None:
        """Check that `load_state_dict` accepts a state. Nothing is changed.

        Raises:
            UsageError: As `load_state_dict`.
        """
        check_version(state)
        own = {"seed": self.seed, "shuffle": self.shuffle, "length": len(self.dataset)}
        absent = [k for k in ("epoch", "consumed", *own) if k not in state]
        other = [
            f"{k} {state[k]!r}, here {v!r}" for k, v in own.items() if k in state and state[k] != v
        ]
        if absent or other:
            raise UsageError(
                "the state is of another order than that of this sampler",
                seen="; ".join([*(f"no {k!r} in the state" for k in absent), *other]),
                fix="Resume with the dataset, seed and shuffle of the saved job.",
            )

    @property
    def start(self) -> int:
        """The place of the order at which the pass at hand began: samples consumed before it."""
        return self._pass.start

    def _warn_of_a_forgotten_epoch(self) -> None:
        if self.shuffle and self.rank == 0 and not self._warned:
            self._warned = True
            warnings.warn(
                f"epoch {self.epoch} is repeated with the same order of samples: "
                "call set_epoch(epoch) before each epoch",
                UsageWarning,
                stacklevel=3,
            )

    def share(self, start: int, rank: int | None = None) -> int:
        """Return how many samples a rank, or this one, takes from place `start` on."""
        left = len(self.dataset) - start
        if self.drop_last:
            return left // self.num_replicas
        if self.pad:
            return -(-left // self.num_replicas)
        rank = self.rank if rank is None else rank
        return max(0, -(-(left - rank) // self.num_replicas))

    def _samples_at(self, places: range) -> Iterable[int]:
        """Return the samples at some places of the epoch's order, which repeats itself."""
        count = len(self.dataset)
        if not self.shuffle:
            is_padded = bool(places) and places[-1] >= count
            return (place % count for place in places) if is_padded else places
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(count, generator=generator, device="cpu")
        own = torch.arange(places.start, places.stop, places.step, device="cpu") % max(count, 1)
        return cast(list[int], order[own].tolist())  # pyright: ignore[reportUnknownMemberType]

    def _walk(self, walk: _SamplerPass) -> Iterator[int]:
        """Yield this rank's places of the order from ``walk.start`` on, counting them."""
        first = walk.start + self.rank
        last = first + self.share(walk.start) * self.num_replicas
        for index in self._samples_at(range(first, last, self.num_replicas)):
            if walk.replaced:
                raise moved(walk.replaced)
            walk.taken += 1
            yield index
        if walk.replaced == LOADED:
            raise moved(walk.replaced)
        walk.ended = True


def check_version(state: Mapping[str, Any]) -> None:
    """Raise UsageError if the state of a sampler or a loader is of a newer format."""
    version = state.get("version", VERSION)
    if isinstance(version, int) and version > VERSION:
        raise UsageError(
            "the position in the data was saved by a newer release of Dure",
            seen=f"it is of format {version}, and this release reads formats up to {VERSION}",
            fix=f"Install {release_that_reads(state.get('needs'))}.",
        )


def moved(why: str) -> UsageError:
    """Return the error of a pass that continues after the position was changed."""
    return UsageError(
        "the position was changed during a pass, so its samples would not be counted",
        seen=f"{why}() was called within the loop over it",
        fix="Leave the loop (break) after the call, and start a new one.",
    )


def _whole(consumed: int) -> int:
    if consumed < 0:
        raise UsageError(
            "the number of consumed samples cannot be negative", seen=f"consumed is {consumed}"
        )
    return consumed


def _place_in_mesh(mesh: HasAxes) -> tuple[int, int]:
    """Return how many ranks see different samples, and which of them this one is."""
    names = mesh.mesh_dim_names or ()
    axes = [axis for axis, name in enumerate(names) if name in DATA_AXES]
    if mesh.ndim == 1:
        axes = [0]
    if not axes:
        raise UsageError(
            "no axis of the mesh is known to be one of data",
            op="DistributedSampler",
            seen=f"{mesh!r}",
            fix='Pass the sub-mesh, as mesh["batch"]; names that are known to be are '
            + ", ".join(sorted(DATA_AXES)),
        )
    place = 0
    for axis in axes:
        place = place * mesh.size(axis) + mesh.get_local_rank(axis)
    return math.prod(mesh.size(axis) for axis in axes), place


def _place_in_world() -> tuple[int, int]:
    """Return the size of this process's world and its rank there."""
    # lazy: data can be split and resumed without the communication layer
    from dure.comm.queries import get_rank, get_world_size, is_initialized

    if not is_initialized() and env.flag("DURE_ELASTIC"):  # `dure.elastic.run` is yet to come
        return env.integer("WORLD_SIZE", 1) or 1, env.integer("RANK", 0) or 0
    return get_world_size(), get_rank()

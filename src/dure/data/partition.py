"""Split a dataset into parts: each sample in exactly one part.

The samples' numbers are shuffled once, by `seed`, and cut at the rounded cumulative fractions:

    cut(i) = round((f(0) + ... + f(i)) * N)        part i = shuffled[cut(i-1) : cut(i)]

Cutting at cumulative fractions, rather than giving every part ``int(f * N)`` samples as the
well-known tutorial does, is what keeps the remainder: with three thirds of 10 samples the tutorial
gives 3 + 3 + 3 and loses one; here it is 3 + 4 + 3. Where the fractions sum to 1, the last cut is
at N. The shuffle is the tutorial's, so the same seed gives the same order.

All ranks make the same cuts from the same seed, so no communication is needed.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from torch.utils.data import Dataset

from dure.errors import UsageError

__all__ = ["DataPartitioner", "Partition", "SizedDataset"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

# Fractions such as 1/3 or 0.7 + 0.2 + 0.1 miss 1 by a few units of the last place.
_ROUNDING = 1e-9


class SizedDataset(Protocol[T_co]):
    """A dataset that knows its length: a list, a tensor, most torch datasets."""

    def __len__(self) -> int:
        """Return how many samples there are."""
        ...

    def __getitem__(self, index: int, /) -> T_co:
        """Return the sample numbered `index`."""
        ...


class Partition(Dataset[T]):
    """A part of a dataset: the samples numbered in `index`, in that order.

    Args:
        data: The complete dataset.
        index: The numbers of this part's samples.

    Obtained from:
        `DataPartitioner.use`.
    """

    def __init__(self, data: SizedDataset[T], index: Sequence[int]) -> None:
        self.data, self.index = data, index

    def __len__(self) -> int:
        """Return how many samples this part has."""
        return len(self.index)

    def __getitem__(self, index: int) -> T:
        """Return the part's sample numbered `index`."""
        return self.data[self.index[index]]


class DataPartitioner(Generic[T]):
    """Cuts a dataset into shuffled parts of given fractions.

    Part sizes differ from ``fraction * len(data)`` by less than one sample, so equal fractions can
    give parts that differ by one. A rank whose part is one larger may have one batch more; where a
    step communicates, all ranks must take equally many, so stop at the smallest count or use
    `DistributedSampler`, which pads.

    Args:
        data: The dataset; anything with a length and an index.
        sizes: The fraction of each part, at least 0; their sum is at most 1. The rest, if
            the sum is less than 1 belongs to no part.
        seed: Of the shuffle; the same on all ranks.

    Raises:
        UsageError: A fraction is negative or not finite, or they sum to more than 1.

    Example:
        ```python
        parts = dist.DataPartitioner(range(100), [0.5, 0.5], seed=7)
        mine = parts.use(dist.get_rank())
        assert len(mine) == 50
        ```
    """

    def __init__(
        self,
        data: SizedDataset[T],
        sizes: Sequence[float] = (0.7, 0.2, 0.1),
        seed: int = 1234,
    ) -> None:
        total = math.fsum(sizes)
        if not sizes or any(not math.isfinite(f) or f < 0 for f in sizes) or total > 1 + _ROUNDING:
            raise UsageError(
                "cannot partition the dataset",
                seen=f"sizes are {list(sizes)}, with sum {total:g}",
                fix="Give fractions of at least 0 with a sum of at most 1, e.g. (0.7, 0.2, 0.1).",
            )
        self.data = data
        order = list(range(len(data)))
        random.Random(seed).shuffle(order)
        cuts = [0, *_cuts(sizes, len(order))]
        self.partitions = [order[a:b] for a, b in itertools.pairwise(cuts)]

    def use(self, partition: int) -> Partition[T]:
        """Return the part numbered `partition`, from 0 (each rank often takes its own number).

        Raises:
            UsageError: There is no such part.
        """
        if not 0 <= partition < len(self.partitions):
            raise UsageError(
                f"there is no part {partition}",
                seen=f"the dataset is cut into {len(self.partitions)}, numbered from 0",
            )
        return Partition(self.data, self.partitions[partition])


def _cuts(sizes: Sequence[float], count: int) -> list[int]:
    """Return where each part of `count` samples ends."""
    ends = [math.fsum(sizes[: i + 1]) for i in range(len(sizes))]
    return [count if end > 1 - _ROUNDING else round(end * count) for end in ends]

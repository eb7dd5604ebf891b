"""The operations that are measured, and how their bytes are counted: as in nccl-tests.

- The *size* is the largest buffer of the operation on one rank: the tensor of all_reduce,
  broadcast, reduce and sendrecv, the gathered tensor of all_gather and gather, the full input of
  reduce_scatter, scatter and all_to_all. The latter five are *divided*: a part for each rank.
- *Algorithm bandwidth* is size / time. *Bus bandwidth* multiplies it by what a link must carry at
  least for each byte of size, in a group of n ranks: a figure that can be held against the speed
  of the hardware for any n.
- sendrecv is a message from rank 0 to rank 1 and one back; its time is half of the round trip.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Literal

import msgspec

DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")
"""Types of elements, by the names that torch gives them."""


@dataclass(frozen=True, slots=True)
class BenchOperation:
    """How an operation is counted: whether its buffer has a part for each rank (`divided`)."""

    bus: Literal["twice", "others", "all", "none"]
    divided: bool = False
    reduces: bool = False

    def bus_factor(self, ranks: int) -> float:
        """Return the bytes a link carries for each byte of size, in a group of `ranks`."""
        others = (ranks - 1) / ranks
        return {"twice": 2 * others, "others": others, "all": 1.0, "none": 0.0}[self.bus]

    def elements(self, num_bytes: int, item_bytes: int, ranks: int) -> int:
        """Return how many elements have `num_bytes`: at least one, of each rank if divided."""
        if self.bus == "none":
            return 0
        count = max(1, num_bytes // item_bytes)
        return max(1, count // ranks) * ranks if self.divided else count


OPERATIONS = {
    "all_reduce": BenchOperation("twice", reduces=True),
    "broadcast": BenchOperation("all"),
    "reduce": BenchOperation("all", reduces=True),
    "all_gather": BenchOperation("others", divided=True),
    "reduce_scatter": BenchOperation("others", divided=True, reduces=True),
    "all_to_all": BenchOperation("others", divided=True),
    "gather": BenchOperation("others", divided=True),
    "scatter": BenchOperation("others", divided=True),
    "sendrecv": BenchOperation("all"),
    "barrier": BenchOperation("none"),
}
"""Every operation by its name in the API, in the order in which `--op all` measures them."""


class BenchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured; the options of `dure bench` say what each field means."""

    backend: str
    ops: list[str]
    dtypes: list[str]
    sizes: list[int]
    samples: int
    sample_s: float


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One operation at one size.

    Attributes:
        num_bytes: Its size; 0 for a barrier.
        count: The elements of it.
        samples_s: Each is the time of one operation, mean over several back to back, of the rank
            that took longest.
        wrong: Elements that differed from what they must be, of all ranks and both checks.
    """

    op: str
    dtype: str
    ranks: int
    num_bytes: int
    count: int
    samples_s: list[float]
    wrong: int

    @property
    def title(self) -> str:
        kind = "" if self.op == "barrier" else f", {self.dtype}"
        return f"{self.op}{kind}, {self.ranks} rank{'s' if self.ranks > 1 else ''}"

    def figures(self) -> dict[str, float]:
        """Return what follows from the samples, without bandwidths if there are no bytes.

        `spread` is half the distance between the quartiles, relative to the median; bandwidths
        are in 10^9 bytes per second.
        """
        median_s = statistics.median(self.samples_s)
        low, _, high = statistics.quantiles(self.samples_s, n=4, method="inclusive")
        found = {"median_s": median_s, "spread": (high - low) / 2 / median_s}
        if self.num_bytes:
            rate = self.num_bytes / median_s / 1e9
            bus_factor = OPERATIONS[self.op].bus_factor(self.ranks)
            found |= {"algorithm_gb_s": rate, "bus_gb_s": rate * bus_factor}
        return found


def show_size(num_bytes: int) -> str:
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 1 << power:
            return f"{num_bytes / (1 << power):.4g} {unit}"
    return f"{num_bytes} B"


def show_time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:#.3g} {unit}".replace(". ", " ")
    return f"{seconds * 1e6:#.3g} us".replace(". ", " ")

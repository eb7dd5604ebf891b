"""What the benchmark can measure: operations, element types, reductions, and how bytes are counted.

The conventions are those of nccl-tests, so that figures can be compared:

- The *size* of a cell is the largest buffer of the operation on one rank: the tensor of all_reduce,
  broadcast, reduce and sendrecv, the gathered tensor of all_gather and gather, the whole input of
  reduce_scatter, scatter and all_to_all. The latter five are *divided*: a part for each rank.
- *Algorithm bandwidth* is size / time. *Bus bandwidth* multiplies it by what a link must carry at
  least for each byte of size, in a group of n ranks: a figure that can be held against the speed
  of the hardware, whatever n is.
- sendrecv is a message from rank 0 to rank 1 and one back; its time is half of the round trip.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["DTYPES", "OPERATIONS", "REDUCTIONS", "Operation"]

DTYPES = {
    "float32": 4,
    "float64": 8,
    "float16": 2,
    "bfloat16": 2,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "int64": 8,
}
"""Bytes of an element, by the name torch gives the type."""

REDUCTIONS = ("sum", "product", "min", "max", "avg")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation.

    Attributes:
        name: As in the API; sendrecv is a pair of send and recv.
        bus: Which factor turns algorithm bandwidth into bus bandwidth.
        divided: Whether the buffer has a part for each rank.
        reduces: Whether a reduction has to be chosen.
        rooted: Whether one rank has a role of its own.
    """

    name: str
    bus: Literal["twice", "others", "whole", "none"]
    divided: bool = False
    reduces: bool = False
    rooted: bool = False

    def bus_factor(self, ranks: int) -> float:
        """Return the bytes a link carries for each byte of size, in a group of `ranks`."""
        others = (ranks - 1) / ranks
        return {"twice": 2 * others, "others": others, "whole": 1.0, "none": 0.0}[self.bus]

    def elements(self, num_bytes: int, item_bytes: int, ranks: int) -> int:
        """Return how many elements stand for `num_bytes`: at least one, of each rank if divided."""
        count = max(1, num_bytes // item_bytes)
        return max(1, count // ranks) * ranks if self.divided else count


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation(name="all_reduce", bus="twice", reduces=True),
        Operation(name="broadcast", bus="whole", rooted=True),
        Operation(name="reduce", bus="whole", reduces=True, rooted=True),
        Operation(name="all_gather", bus="others", divided=True),
        Operation(name="reduce_scatter", bus="others", divided=True, reduces=True),
        Operation(name="all_to_all", bus="others", divided=True),
        Operation(name="gather", bus="others", divided=True, rooted=True),
        Operation(name="scatter", bus="others", divided=True, rooted=True),
        Operation(name="sendrecv", bus="whole"),
        Operation(name="barrier", bus="none"),
    )
}
"""Every operation by name, in the order in which `--op all` measures them."""

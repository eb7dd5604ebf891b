"""What the user asked to measure: read from words of the command line, and checked at once.

How bytes are counted is as in nccl-tests, so that figures can be compared:

- The *size* of a cell is the largest buffer of the operation on one rank: the tensor of all_reduce,
  broadcast, reduce and sendrecv, the gathered tensor of all_gather and gather, the whole input of
  reduce_scatter, scatter and all_to_all. The latter five are *divided*: a part for each rank.
- *Algorithm bandwidth* is size / time. *Bus bandwidth* multiplies it by what a link must carry at
  least for each byte of size, in a group of n ranks: a figure that can be held against the speed
  of the hardware, whatever n is.
- sendrecv is a message from rank 0 to rank 1 and one back; its time is half of the round trip.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from dure.errors import UsageError

_BACKENDS = ("shm", "gloo", "mpi", "hybrid")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"(\d+)\s*([KMG]?)(?:I?B)?", re.IGNORECASE)
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

_REDUCTIONS = ("sum", "product", "min", "max", "avg")


@dataclass(frozen=True, slots=True)
class Operation:
    """How an operation is counted: whether its buffer has a part for each rank (`divided`)."""

    bus: Literal["twice", "others", "whole", "none"]
    divided: bool = False
    reduces: bool = False

    def bus_factor(self, ranks: int) -> float:
        """Return the bytes a link carries for each byte of size, in a group of `ranks`."""
        others = (ranks - 1) / ranks
        return {"twice": 2 * others, "others": others, "whole": 1.0, "none": 0.0}[self.bus]

    def elements(self, num_bytes: int, item_bytes: int, ranks: int) -> int:
        """Return how many elements stand for `num_bytes`: at least one, of each rank if divided."""
        count = max(1, num_bytes // item_bytes)
        return max(1, count // ranks) * ranks if self.divided else count


OPERATIONS = {
    "all_reduce": Operation("twice", reduces=True),
    "broadcast": Operation("whole"),
    "reduce": Operation("whole", reduces=True),
    "all_gather": Operation("others", divided=True),
    "reduce_scatter": Operation("others", divided=True, reduces=True),
    "all_to_all": Operation("others", divided=True),
    "gather": Operation("others", divided=True),
    "scatter": Operation("others", divided=True),
    "sendrecv": Operation("whole"),
    "barrier": Operation("none"),
}
"""Every operation by its name in the API, in the order in which `--op all` measures them."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides what is measured; the options of `dure bench` say what each means."""

    backend: str
    ops: tuple[str, ...]
    dtypes: tuple[str, ...]
    redop: str
    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    root: int
    arena: bool
    against: tuple[str, ...]
    samples: int
    sample_s: float

    def check(self, free_bytes: int) -> None:
        """Raise `UsageError` for what cannot be measured; `free_bytes` is the memory there is."""
        _one_of("backend", self.backend, _BACKENDS)
        _one_of("redop", self.redop, _REDUCTIONS)
        integers = [d for d in self.dtypes if "int" in d]
        if self.redop == "avg" and integers:
            raise UsageError("avg is measured with floats only", seen=", ".join(integers))
        if self.root >= min(self.ranks):
            raise UsageError(
                "the root must be one of the ranks",
                seen=f"--root {self.root}, --ranks {min(self.ranks)}",
            )
        if "sendrecv" in self.ops and min(self.ranks) < 2:
            raise UsageError("sendrecv needs 2 ranks", seen=f"--ranks {min(self.ranks)}")
        # source, target, what is expected, a byte an element: for each rank of each group
        processes = max(self.ranks) * (1 + len(self.against))
        need = int(3.5 * max(self.sizes) * processes)
        if need > free_bytes:
            raise UsageError(
                f"this takes about {need / 2**30:.1f} GiB of memory",
                seen=f"{free_bytes / 2**30:.1f} GiB are free; {processes} processes have buffers "
                f"of {show_size(max(self.sizes))}",
                fix="Use fewer --ranks, smaller --sizes, or fewer rivals.",
            )


def parse_names(option: str, words: Sequence[str], known: Mapping[str, object]) -> tuple[str, ...]:
    """Read names from repeated, comma-separated words; "all" stands for every known one."""
    names = _words(words)
    if names == ["all"]:
        return tuple(known)
    for name in names:
        _one_of(option, name, list(known))
    return tuple(dict.fromkeys(names))


def parse_ranks(words: Sequence[str]) -> tuple[int, ...]:
    names = _words(words)
    if not names or not all(n.isdigit() and int(n) > 0 for n in names):
        raise UsageError("--ranks takes whole numbers from 1", seen=",".join(words), fix="Try 2,4.")
    return tuple(dict.fromkeys(int(n) for n in names))


def parse_rivals(words: Sequence[str]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(_words(words)))
    for name in names:
        if name not in {"gloo", "mpi", "arena"} and not re.fullmatch("mpi@.+", name):
            fix = "Use gloo, mpi, mpi@/path/to/python, or arena."
            raise UsageError(f"there is no baseline {name!r}", fix=fix)
    return names


def parse_sizes(text: str) -> tuple[int, ...]:
    """Read sizes: "8,64K,1M", or "8:64M:4x" for 8, 32, and so on, with 64M at last anyway."""
    try:
        sizes = _progression(*text.split(":")) if ":" in text else map(_bytes, text.split(","))
        return tuple(sorted(set(sizes)))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"the sizes {text!r} cannot be understood",
            seen=str(error) if isinstance(error, ValueError) else "",
            fix="Give a list such as 8,64K,1M, or MIN:MAX:FACTOR such as 8:64M:4x.",
        ) from None


def _progression(low: str, high: str, factor: str = "4x") -> Iterable[int]:
    number = factor.strip().lower().removesuffix("x")
    if not number.isdigit() or int(number) < 2:
        raise ValueError(f"{factor!r} is no factor from 2x")
    at, most = _bytes(low), _bytes(high)
    if at > most:
        raise ValueError("the first is larger than the last")
    while at < most:
        yield at
        at *= int(number)
    yield most


def _bytes(word: str) -> int:
    match = _SIZE.fullmatch(word.strip())
    if match is None:
        raise ValueError(f"{word!r} is no size")
    size = int(match[1]) * _UNITS[match[2].upper()]
    if size < 1:
        raise ValueError("the smallest size is 1 byte")
    return size


def show_size(num_bytes: int) -> str:
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 1 << power:
            return f"{num_bytes / (1 << power):.4g} {unit}"
    return f"{num_bytes} B"


def _words(words: Sequence[str]) -> list[str]:
    return [part.strip() for word in words for part in word.split(",") if part.strip()]


def _one_of(option: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise UsageError(f"there is no {option} {name!r}", fix=f"Use one of {', '.join(known)}.")

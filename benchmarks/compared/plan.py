"""What is measured: read from words of the command line, and checked at once.

Bytes and times are counted as by `dure bench` (`dure.cli.bench.operations`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec
import torch

from dure.cli.bench.operations import DTYPES, show_size
from dure.errors import UsageError

ITEM_BYTES = {name: getattr(torch, name).itemsize for name in DTYPES}
_BACKENDS = ("shm", "gloo", "mpi", "hybrid")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"([1-9]\d*)([KMG]?)", re.IGNORECASE)
_REDUCTIONS = ("sum", "product", "min", "max", "avg")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured; the options of collectives.py say what each field means."""

    backend: str
    ops: tuple[str, ...]
    dtypes: tuple[str, ...]
    redop: str
    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
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
    """Read sizes: "8,64K,1M"."""
    return tuple(sorted({_bytes(word) for word in text.split(",")}))


def _bytes(word: str) -> int:
    match = _SIZE.fullmatch(word.strip())
    if match is None:
        raise UsageError("--sizes must be numbers of bytes, such as 8,64K,1M", seen=repr(word))
    return int(match[1]) * _UNITS[match[2].upper()]


def _words(words: Sequence[str]) -> list[str]:
    return [part.strip() for word in words for part in word.split(",") if part.strip()]


def _one_of(option: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise UsageError(f"there is no {option} {name!r}", fix=f"Use one of {', '.join(known)}.")

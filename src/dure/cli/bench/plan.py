"""What the user asked to measure: read from words of the command line, and checked at once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from dure.cli.bench.operations import REDUCTIONS
from dure.errors import UsageError

__all__ = [
    "BACKENDS",
    "Plan",
    "parse_names",
    "parse_ranks",
    "parse_rivals",
    "parse_sizes",
    "show_size",
]

BACKENDS = ("shm", "gloo", "mpi", "hybrid")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"(\d+)\s*([KMG]?)(?:I?B)?", re.IGNORECASE)
_MAX_SIZES = 64


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides what is measured.

    Attributes:
        backend: Of `dure.init_process_group`.
        ops: Names in `OPERATIONS`.
        dtypes: Names in `DTYPES`.
        redop: A name in `REDUCTIONS`, for the operations that reduce.
        ranks: Sizes of the groups, one after the other.
        sizes: Bytes, ascending.
        root: For the operations that have one; -1: each rank in turn.
        arena: Whether Dure's tensors come from `shared_empty`.
        against: The rivals: "gloo", "mpi", "mpi@PYTHON", or "arena" (Dure, as with `arena`).
        samples: How many are taken of each cell.
        sample_s: How long one should take; at least one operation.
    """

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
        _one_of("backend", self.backend, BACKENDS)
        _one_of("redop", self.redop, REDUCTIONS)
        integers = [d for d in self.dtypes if "int" in d]
        if self.redop == "avg" and integers:
            raise UsageError("an average needs floating-point numbers", seen=", ".join(integers))
        if self.root >= min(self.ranks):
            raise UsageError(
                "the root must be one of the ranks",
                seen=f"--root {self.root}, --ranks {min(self.ranks)}",
            )
        if "sendrecv" in self.ops and min(self.ranks) < 2:
            raise UsageError("sendrecv needs 2 ranks", seen=f"--ranks {min(self.ranks)}")
        self._check_memory(free_bytes)

    def _check_memory(self, free_bytes: int) -> None:
        """Source, target, and the comparison's own byte an element: for each rank of each group."""
        processes = max(self.ranks) * (1 + len(self.against))
        need = int(2.5 * max(self.sizes) * processes)
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
    """Read numbers of ranks, such as "2,4"."""
    names = _words(words)
    if not names or not all(n.isdigit() and int(n) > 0 for n in names):
        raise UsageError("--ranks takes whole numbers from 1", seen=",".join(words), fix="Try 2,4.")
    return tuple(dict.fromkeys(int(n) for n in names))


def parse_rivals(words: Sequence[str]) -> tuple[str, ...]:
    """Read rivals: gloo, mpi, mpi@PYTHON, arena."""
    names = tuple(dict.fromkeys(_words(words)))
    for name in names:
        if name not in {"gloo", "mpi", "arena"} and not re.fullmatch("mpi@.+", name):
            raise UsageError(
                f"there is no rival {name!r}",
                fix="Use gloo, mpi, mpi@/path/to/python, or arena.",
            )
    return names


def parse_sizes(text: str) -> tuple[int, ...]:
    """Read sizes: "8,64K,1M", or "8:64M:4x" for 8, 32, and so on, with 64M at last anyway."""
    if ":" not in text:
        sizes = sorted({_bytes(part, text) for part in text.split(",")})
    else:
        low, high, *factors = text.split(":")
        if len(factors) > 1:
            raise _malformed(text)
        factor = _factor(factors[0] if factors else "4x", text)
        least, most = _bytes(low, text), _bytes(high, text)
        if least > most:
            raise _malformed(text, "the first is larger than the last")
        sizes = [least]
        while sizes[-1] < most and len(sizes) <= _MAX_SIZES:
            sizes.append(min(most, sizes[-1] * factor))
    if len(sizes) > _MAX_SIZES:
        raise _malformed(text, f"more than {_MAX_SIZES} sizes")
    return tuple(sizes)


def show_size(num_bytes: int) -> str:
    """Write a number of bytes with the largest unit that suits it."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 1 << power:
            return f"{num_bytes / (1 << power):.4g} {unit}"
    return f"{num_bytes} B"


def _words(words: Sequence[str]) -> list[str]:
    return [part.strip() for word in words for part in word.split(",") if part.strip()]


def _bytes(word: str, text: str) -> int:
    match = _SIZE.fullmatch(word.strip())
    if match is None:
        raise _malformed(text, f"{word!r} is no size")
    size = int(match[1]) * _UNITS[match[2].upper()]
    if size < 1:
        raise _malformed(text, "the smallest size is 1 byte")
    return size


def _factor(word: str, text: str) -> int:
    number = word.strip().lower().removesuffix("x")
    if not number.isdigit() or int(number) < 2:
        raise _malformed(text, f"{word!r} is no factor from 2x")
    return int(number)


def _malformed(text: str, seen: str = "") -> UsageError:
    return UsageError(
        f"the sizes {text!r} cannot be understood",
        seen=seen,
        fix="Give a list such as 8,64K,1M, or MIN:MAX:FACTOR such as 8:64M:4x.",
    )


def _one_of(option: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise UsageError(f"there is no {option} {name!r}", fix=f"Use one of {', '.join(known)}.")

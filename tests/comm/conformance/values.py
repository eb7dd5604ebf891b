"""Data for the cases, and an oracle that shares no code with Dure: numbers of plain Python.

Every rank can compute every other rank's data. Inputs are small integers (extremes where integers
wrap around), so that results are exact and equality is equality of bits.
"""

from __future__ import annotations

import functools
import math
import operator
import warnings

import torch

_PERIOD = 420
"""After how many elements the numbers of a rank repeat, for every dtype."""
LARGE = 131_101
"""A prime; as float32 just over 512 KiB, more than one chunk of any backend."""


def thorough(n: int) -> bool:
    """Tell whether `n` ranks try every form with every dtype; other numbers of ranks try a few."""
    return n in (2, 3)


def counts(n: int) -> list[int]:
    """Return the lengths that every form is tried with on `n` ranks."""
    return [*sorted({0, 1, n - 1, n, n + 1}), LARGE]


def _movable(dtype: torch.dtype) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of complex32, once in a process
            torch.zeros(32, dtype=torch.uint8).view(dtype).clone()
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return True


DTYPES = sorted(
    {d for d in vars(torch).values() if isinstance(d, torch.dtype) and _movable(d)}, key=str
)
"""Every dtype of which torch can hold a tensor on the CPU and copy it."""


FEW = [torch.bool, torch.bfloat16, torch.uint16, torch.float8_e5m2, torch.complex64, torch.int64]


def movable(n: int) -> list[torch.dtype]:
    """Return the dtypes that the forms that move data are tried with on `n` ranks."""
    return DTYPES if thorough(n) else FEW


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, for comparing."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Tell whether two tensors have the same shape and the same bits."""
    return actual.shape == expected.shape and torch.equal(as_bytes(actual), as_bytes(expected))


def noise(seed: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Make a tensor [count] of random bits that are legal for `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).to(torch.bool)
    size = count * dtype.itemsize
    return torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8).view(dtype)


def numbers(rank: int, count: int, dtype: torch.dtype, product: bool = False) -> list:
    """Return what rank `rank` contributes to a reduction, as Python numbers."""
    if dtype is torch.bool:
        return [(i * 5 + rank * 3) % 7 < 3 + i % 3 for i in range(count)]
    if dtype.is_complex:
        units = [1 + 0j, 1j, 1 + 1j, -1 + 2j]
        return [units[(i + rank) % (3 if product else 4)] for i in range(count)]
    if dtype is torch.float8_e8m0fnu:
        return [2.0 ** ((i + rank) % 2) for i in range(count)]
    if dtype.is_floating_point:
        if product:
            return [2.0 if (i + rank) % 4 == 0 else 1.0 for i in range(count)]
        return [float((i * 7 + rank * 3) % 5) - 1 for i in range(count)]
    limits = torch.iinfo(dtype)
    pool = [limits.max, limits.min, 3, 1, limits.max - 2, 7, 2]
    return [pool[(i * 3 + rank * (1 + i % 2)) % len(pool)] for i in range(count)]


def tensor_of(values: list, dtype: torch.dtype) -> torch.Tensor:
    """Make a tensor of Python numbers."""
    if dtype is torch.complex32:
        return torch.tensor(values, dtype=torch.complex64).to(dtype)
    if dtype.is_floating_point and dtype.itemsize == 1:
        return torch.tensor(values, dtype=torch.float32).to(dtype)
    return torch.tensor(values, dtype=dtype)


def contribution(rank: int, count: int, dtype: torch.dtype, op: str) -> torch.Tensor:
    """Return what rank `rank` contributes to the reduction `op`, [count]."""
    values = numbers(rank, min(count, _PERIOD), dtype, op == "PRODUCT")
    return _repeated(tensor_of(values, dtype), count)


def _repeated(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Return `count` elements, which repeat those of `tensor`; computed once in plain Python."""
    if count <= _PERIOD:
        return tensor
    data = tensor.view(torch.uint8).repeat(-(-count // _PERIOD))
    return data.view(tensor.dtype)[:count].clone()


def reduced(n: int, count: int, dtype: torch.dtype, op: str) -> torch.Tensor:
    """Return what `op` makes of the contributions of `n` ranks, [count]."""
    return _repeated(_reduced(n, min(count, _PERIOD), dtype, op), count)


def _reduced(n: int, count: int, dtype: torch.dtype, op: str) -> torch.Tensor:
    columns = zip(*(numbers(r, count, dtype, op == "PRODUCT") for r in range(n)), strict=True)
    if dtype is torch.bool:
        fold = {"SUM": any, "MAX": any, "BOR": any, "PRODUCT": all, "MIN": all, "BAND": all}
        return tensor_of([fold.get(op, _odd)(c) for c in columns], dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return _reduced_floats([list(c) for c in columns], n, dtype, op)
    folded = [_wrapped(_FOLDS[op](c), dtype) for c in columns]
    if op == "AVG":
        folded = [abs(total) // n * (-1 if total < 0 else 1) for total in folded]
    return tensor_of(folded, dtype)


def _odd(column: tuple) -> bool:
    return sum(column) % 2 == 1


_FOLDS = {
    "SUM": sum,
    "AVG": sum,
    "PRODUCT": math.prod,
    "MIN": min,
    "MAX": max,
    "BAND": functools.partial(functools.reduce, operator.and_),
    "BOR": functools.partial(functools.reduce, operator.or_),
    "BXOR": functools.partial(functools.reduce, operator.xor),
}


def _wrapped(value: int, dtype: torch.dtype) -> int:
    """Return the integer of `dtype` with the same low bits."""
    limits = torch.iinfo(dtype)
    return (value - limits.min) % (1 << limits.bits) + limits.min


def _reduced_floats(columns: list, n: int, dtype: torch.dtype, op: str) -> torch.Tensor:
    """Reduce exactly in double precision; average and round as the contract says."""
    exact = [_FOLDS[op](c) for c in columns]
    wide = torch.complex128 if dtype.is_complex else torch.float64
    if dtype.itemsize < 8 * (2 if dtype.is_complex else 1):
        wide = torch.complex64 if dtype.is_complex else torch.float32
    result = torch.tensor(exact, dtype=wide)
    if op == "AVG":
        parts = torch.view_as_real(result) if dtype.is_complex else result
        parts.div_(n)
    return result.to(dtype)

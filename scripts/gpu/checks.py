"""What the checks of a GPU share: their list, the device, and the kinds of results."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import dure as dist
from dure.errors import DeviceError, DtypeError, UsageError
from dure.store import HashStore
from dure.tensor import DTensor

LIMIT_S = 30.0
DEVICE = torch.device(os.environ.get("GPU_CHECK_DEVICE", "cuda:0"))
BACKEND = "nccl" if DEVICE.type == "cuda" else "gloo"

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
FLOATS8 = (torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
WIDE = (torch.uint16, torch.uint32, torch.uint64)
COMPLEX = (torch.complex64, torch.complex128)
ALL = (*FLOATS, *FLOATS8, *INTEGERS, *WIDE, *COMPLEX, torch.bool)


@dataclass(frozen=True)
class Check:
    """One line of the table: `run` returns what is to be printed beside the result."""

    part: str
    name: str
    run: Callable[[], object]
    cuda: bool = False
    alone: bool = False
    """It measures, so nothing else may run."""
    may_refuse: bool = False
    """An error that says "not supported" is what docs/gpu.md promises, not a failure."""


CHECKS: list[Check] = []


def check(
    part: str, name: str = "", cuda: bool = False, alone: bool = False, may_refuse: bool = False
) -> Callable[..., Any]:
    """Add a function to `CHECKS`."""

    def add(run: Callable[[], object]) -> Callable[[], object]:
        shown = name or run.__name__.replace("_", " ")
        CHECKS.append(Check(part, shown, run, cuda, alone, may_refuse))
        return run

    return add


@contextmanager
def one_rank(backend: str | None = "", **options: Any) -> Iterator[None]:
    """Be the only rank of a job."""
    if DEVICE.type == "cuda":
        options.setdefault("device_id", DEVICE)
    backend = BACKEND if backend == "" else backend
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, **options)
    yield
    dist.destroy_process_group()


@contextmanager
def alone(**options: Any) -> Iterator[None]:
    """Be the only rank of a job as a launcher starts it, with no backend named."""
    with tempfile.TemporaryDirectory() as folder:
        place = f"file://{folder}/store"
        dist.init_process_group(init_method=place, rank=0, world_size=1, **options)
        yield
        dist.destroy_process_group()


def equal(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Compare bytes of contiguous tensors on the host."""
    return found.dtype == wanted.dtype and bytes_of(found) == bytes_of(wanted)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def numbers(dtype: torch.dtype, count: int = 6) -> torch.Tensor:
    """Return small numbers of a dtype on the device."""
    return (torch.arange(count) % 3).to(dtype).to(DEVICE)


def for_each(dtypes: tuple[torch.dtype, ...], action: Callable[[torch.dtype], bool]) -> str:
    """Try all dtypes; say which were wrong or raised, or how many were right."""
    trouble: list[str] = []
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        try:
            if not action(dtype):
                trouble.append(f"{name}: wrong values")
        except Exception as error:
            trouble.append(f"{name}: {told(error)}")
    assert not trouble, "; ".join(trouble)
    return f"{len(dtypes)} dtypes"


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the complete tensor of a DTensor, and a plain one as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Refused(Exception):
    """A check was refused; the text says how."""


REFUSALS = (Refused, UsageError, DtypeError, DeviceError)


def outcome(error: BaseException, may_refuse: bool) -> str:
    """Return the result of a check that raised `error`."""
    return "refused" if may_refuse and isinstance(error, REFUSALS) else "FAILED"


def told(error: BaseException) -> str:
    """Return an error's type and first line."""
    text = (str(error).strip().splitlines() or [""])[0].replace("|", "/")
    return text if isinstance(error, Refused) else f"{type(error).__name__}: {text}"

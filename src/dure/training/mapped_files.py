"""Shards, gradients and optimizer state in files, for models that are larger than memory.

A file is mapped (MAP_SHARED): its pages are memory while they are used, and the kernel writes them
back and takes them away when it needs room. Nothing here reads or writes. Room on the disk is taken
when a file is made, so that it does not run out later. A file loses its name as soon as it is
mapped, so that it goes with the processes that have it, however they end.

State of an optimizer is made by ``torch.zeros_like(parameter)`` in the optimizer's `_init_group`;
there it is put into files at once. State that an optimizer makes elsewhere (SGD's momentum, a
loaded state dictionary) is moved after the next step.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode

from dure.errors import CommError, UsageError
from dure.tensor.dtensor import DTensor
from dure.tensor.wrapping import wrap

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["Files"]

_hooked = False


class Files:
    """Makes tensors whose memory is in files of a folder.

    Args:
        folder: On a disk of this host. No file has a name there for longer than a moment.

    Raises:
        UsageError: There is no such folder, or no file can be made in it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder).absolute()  # the program may change its working directory
        self.zeros(torch.Size((1,)), torch.uint8)
        _hook_optimizers()

    def zeros(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros [shape] of this rank's own.

        Raises:
            UsageError: The folder cannot be written.
            CommError: The disk has no room.
        """
        if shape.numel() == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        try:
            descriptor, name = tempfile.mkstemp(prefix="dure-", dir=self._folder)
        except OSError as error:
            raise self._unusable(error) from None
        try:
            self._reserve(descriptor, shape.numel() * dtype.itemsize)
            return _mapped(name, shape.numel(), dtype).view(shape)
        finally:
            os.unlink(name)

    def shared_zeros(self, group: ProcessGroup, nbytes: int) -> torch.Tensor:
        """Return zeroed bytes [nbytes] that are the same file on all ranks, which are on one host.

        Collective:
            All ranks of the group.

        Raises:
            UsageError, CommError: As `zeros`; on all ranks.
        """
        number = torch.tensor([secrets.randbits(62)], device="cpu")
        group.broadcast(number, 0)
        name = self._folder / f"dure-{int(number):x}"
        failed: Exception | None = None
        if group.rank() == 0:
            try:
                descriptor = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
                self._reserve(descriptor, nbytes)
            except OSError as error:
                failed = self._unusable(error)
            except CommError as error:
                failed = error
        group.barrier()
        try:
            if failed is not None:
                raise failed
            if not name.exists():
                raise UsageError(
                    "the first rank's file is missing",
                    op="OffloadPolicy",
                    seen=str(name),
                    fix="Give all ranks of a host the same folder; see the first rank's error.",
                )
            memory = _mapped(str(name), nbytes, torch.uint8)
        finally:
            group.barrier()
            if group.rank() == 0:
                name.unlink(missing_ok=True)
        return memory

    def like(self, tensor: DTensor) -> DTensor:
        """Return zeros that lie as a DTensor does, in a file."""
        made = wrap(self.zeros(tensor.part.shape, tensor.dtype), tensor.spec)
        made._dure_in_file = True  # pyright: ignore
        return made

    def _reserve(self, descriptor: int, nbytes: int) -> None:
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as error:
            raise CommError(
                "the disk has no room for shards",
                op="OffloadPolicy",
                seen=f"{nbytes:,} bytes in {self._folder}: {error.strerror}",
            ) from None
        finally:
            os.close(descriptor)

    def _unusable(self, error: OSError) -> UsageError:
        return UsageError(
            "no file can be made in the folder for shards",
            op="OffloadPolicy",
            seen=f"{self._folder}: {error.strerror}",
            fix="Give a folder that exists and can be written, on a disk of this host.",
        )


def _mapped(name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_file(name, shared=True, size=numel, dtype=dtype)


# ---------------------------------------------------------------- state of optimizers


class _StateInFiles(TorchFunctionMode):
    """Puts what ``torch.zeros_like`` makes of a parameter with files into files."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        files: Files | None = None
        if func is torch.zeros_like:
            files = getattr(args[0], "_dure_files", None)
        if files is None or "dtype" in (kwargs or {}):
            return func(*args, **(kwargs or {}))
        return files.like(args[0])


def _hook_optimizers() -> None:
    global _hooked
    if not _hooked:
        _hooked = True
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)


def _with_files(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Any, Files]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            files = getattr(parameter, "_dure_files", None)
            if files is not None:
                yield parameter, files


def _before_step(optimizer: Any, *_: object) -> None:
    """Have the optimizer make its state in files."""
    make: Callable[..., Any] | None = getattr(optimizer, "_init_group", None)
    if make is None or hasattr(make, "_dure_in_files") or not any(_with_files(optimizer)):
        return

    @wraps(make)
    def make_in_files(*args: Any, **kwargs: Any) -> Any:
        with _StateInFiles():
            return make(*args, **kwargs)

    make_in_files._dure_in_files = True  # pyright: ignore
    optimizer._init_group = make_in_files


def _after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Move what the optimizer made otherwise."""
    for parameter, files in _with_files(optimizer):
        state = optimizer.state.get(parameter, {})
        for name, value in state.items():
            elsewhere = isinstance(value, DTensor) and not hasattr(value, "_dure_in_file")
            if elsewhere and value.shape == parameter.shape:
                moved = files.like(value)
                moved.part.copy_(value.part)
                state[name] = moved

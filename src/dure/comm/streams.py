"""Streams of accelerators in threads that work for another thread.

A thread starts in the default stream of each device. Its copies to a device are therefore not
ordered with the work of the thread that started it, unless it uses that thread's streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch

__all__ = ["in_streams_of_caller"]


def in_streams_of_caller(
    work: Callable[[], None], tensors: Iterable[torch.Tensor]
) -> Callable[[], None]:
    """Return a function that does `work`, in any thread, in the current streams of this one.

    Args:
        work: Reads or writes the tensors.
        tensors: On any devices; those without streams are left alone.
    """
    blocks: list[tuple[Any, Any]] = []
    for device in {t.device for t in tensors if t.device.type not in ("cpu", "meta")}:
        module: Any = torch.get_device_module(device)
        if hasattr(module, "current_stream"):
            blocks.append((module, module.current_stream(device)))

    def run() -> None:
        with ExitStack() as stack:
            for module, stream in blocks:
                stack.enter_context(module.stream(stream))
            work()

    return run

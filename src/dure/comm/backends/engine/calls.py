"""What a foreign engine must be able to do, so that `EngineGroup` can make a backend of it."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

import torch

__all__ = ["EngineCalls", "EngineWork"]


class EngineWork(Protocol):
    """What is used of torch's `Work`."""

    def is_completed(self) -> bool:
        """Tell whether it ended, well or badly."""
        ...

    def wait(self, timeout: timedelta = ...) -> bool:
        """Block until it ended, or raise."""
        ...

    def _source_rank(self) -> int:
        """Return who sent what a finished receive got."""
        ...


class EngineCalls(Protocol):
    """What is wanted of an engine. Each call starts its work at once and blocks on no peer.

    Tensors are flat, contiguous, not empty, and of one length on all ranks; `op` is the name of a
    reduction. RuntimeError is what engines raise; its text is all there is to go by.
    """

    name: str
    """As users name it."""
    device_types: frozenset[str]
    """Types of `torch.device` whose tensors it takes."""
    in_stream: bool
    """It orders its work by CUDA streams: waiting does not block the host."""
    bitwise: bool
    """It has BAND, BOR and BXOR."""
    any_source: bool
    """It can receive from just anyone."""

    def all_reduce(self, wire: torch.Tensor, op: str) -> EngineWork:
        """Reduce in place."""
        ...

    def reduce(self, wire: torch.Tensor, op: str, dst: int) -> EngineWork:
        """Reduce in place on `dst`; elsewhere `wire` is scratch memory."""
        ...

    def reduce_scatter(self, output: torch.Tensor, wire: torch.Tensor, op: str) -> EngineWork:
        """Reduce `wire` [n*k]; rank i's part goes to `output` [k]."""
        ...

    def broadcast(self, wire: torch.Tensor, src: int) -> EngineWork:
        """Copy that of `src` to all."""
        ...

    def all_gather(self, output: torch.Tensor, wire: torch.Tensor) -> EngineWork:
        """Copy rank i's `wire` [k] to `output` [n*k] at i*k."""
        ...

    def exchange(
        self, output: torch.Tensor, wire: torch.Tensor, takes: list[int], gives: list[int]
    ) -> EngineWork:
        """Send `gives[j]` elements to rank j, take `takes[i]` of rank i; both empty: equal parts.

        Here tensors may be empty, and of different lengths.
        """
        ...

    def barrier(self) -> EngineWork:
        """End when all ranks have called."""
        ...

    def send(self, wire: torch.Tensor, dst: int, tag: int) -> EngineWork:
        """Send to `dst`."""
        ...

    def recv(self, wire: torch.Tensor, src: int | None, tag: int) -> EngineWork:
        """Receive from `src`, or from anyone."""
        ...

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long work that begins later may take."""
        ...

    def leave(self) -> None:
        """End in good order; nothing is pending."""
        ...

    def break_off(self) -> None:
        """Close the connections to all peers, so that what is pending fails, here and there."""
        ...

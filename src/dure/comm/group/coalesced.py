"""What a group keeps while a thread is inside a coalescing manager (comm/coalescing.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dure.comm.work import Work
from dure.native import Channel

__all__ = ["Coalescing", "PlainCollectives"]


@dataclass(slots=True)
class Coalescing:
    """The coalescing manager that a thread is inside."""

    works: list[Work]
    thread: int


class PlainCollectives:
    """The plain calls of an engine, except its messages, which take the slow path here."""

    def __init__(self, engine: Channel) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def plain_send(self, *_: object) -> None:
        """Send nothing."""

    plain_receive = plain_send

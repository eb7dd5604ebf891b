"""What a test lets others call."""

from __future__ import annotations

from rpc.served_elsewhere import imported

__all__ = ["Counter", "constant", "double", "imported"]

constant = 3


def double(number: int) -> int:
    return 2 * number


class Counter:
    def __init__(self, number: int) -> None:
        self.number = number

    def add(self, number: int) -> int:
        self.number += number
        return self.number

    def _hidden(self) -> None:
        pass

    @classmethod
    def made(cls) -> Counter:
        return cls(0)

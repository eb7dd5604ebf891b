"""What a test lets others call."""

from __future__ import annotations

from enum import Enum

from tests.rpc.served_elsewhere import imported

__all__ = ["Colour", "Counter", "Wrong", "constant", "double", "imported", "settings"]

constant = 3
_settings = {"open": False}


def settings() -> dict[str, bool]:
    return _settings


class Wrong(Exception):
    pass


class Colour(Enum):
    RED = "red"


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

"""What the texts of flags mean: functions from a text to a value.

The same functions read the command line and variables. A text that is not a value raises
`ValueError` or `KeyError`, and the message shows the form that the help shows (`N|MIN:MAX`). If
that does not say enough, it is argparse's `ArgumentTypeError`, with the message.
"""

from __future__ import annotations

import re
import signal
from argparse import ArgumentTypeError
from collections.abc import Callable

from dure.launch import Std, StreamChoice

_TRUTH = {
    **dict.fromkeys(("1", "true", "t", "yes", "y"), True),
    **dict.fromkeys(("0", "false", "f", "no", "n"), False),
}
_SIZES = {"": 0, "K": 10, "M": 20, "G": 30}


def count(text: str) -> int:
    """Read an integer from 0 up."""
    if int(text) < 0:
        raise ValueError
    return int(text)


def port(text: str) -> int:
    """Read the number of a port."""
    if not 0 < int(text) < 1 << 16:
        raise ArgumentTypeError(f"must be from 1 to 65535, got {text}")
    return int(text)


def size(text: str) -> int:
    """Read a number of bytes: 1000000, 500K, 100M, 2G (powers of 1024)."""
    found = re.fullmatch(r"([1-9][0-9]{0,15})([KMG]?)", text.strip().upper())
    if found is None:
        raise ValueError
    return int(found[1]) << _SIZES[found[2]]


def seconds(text: str) -> float:
    """Read a duration in seconds."""
    if not 0 <= float(text) < float("inf"):
        raise ValueError
    return float(text)


def nproc(text: str) -> int | str:
    """Read a number of ranks, or a kind of device that is counted later."""
    return text if text in ("auto", "cpu", "gpu", "xpu") else int(text)


def nnodes(text: str) -> tuple[int, int]:
    """Read `2`, exactly two hosts, or `1:4`, from one to four."""
    least, colon, most = text.partition(":")
    return int(least), int(most if colon else least)


def streams(text: str) -> StreamChoice:
    """Read `3` (both streams of every rank), or `0:1,1:2` (rank 0's output, rank 1's errors)."""
    numbers = {str(int(std)): std for std in (Std.NONE, Std.OUT, Std.ERR, Std.ALL)}
    if text in numbers:
        return numbers[text]
    chosen = (part.partition(":") for part in text.split(","))
    return {int(rank): numbers[number] for rank, _, number in chosen}


def ranks(text: str) -> frozenset[int] | None:
    """Read `0,2` as local ranks; an empty text means all."""
    return frozenset(map(int, text.split(","))) if text.strip() else None


def words(text: str) -> tuple[str, ...]:
    """Read a list with commas, in which a doubled comma is one that belongs to a word."""
    mark = "\0"
    return tuple(x.replace(mark, ",") for x in text.replace(",,", mark).split(",") if x)


def signals(text: str) -> tuple[int, ...]:
    """Read names of signals with commas between."""
    found = dict.fromkeys(signal.Signals[name.strip().upper()] for name in text.split(","))
    if found.keys() & {signal.SIGKILL, signal.SIGSTOP}:
        raise ArgumentTypeError("SIGKILL and SIGSTOP cannot be handled")
    return tuple(found)


_CONFIG: dict[str, Callable[[str], object]] = {
    **dict.fromkeys(("join_timeout", "timeout", "last_call_timeout"), seconds),
    # How long a launcher may be silent: its lease, or torch's interval times its attempts.
    **dict.fromkeys(("lease", "keep_alive_interval", "keep_alive_max_attempt"), seconds),
    # These have no effect: a host that has gone is noticed by the end of its connection, and
    # nothing waits for a rendezvous to close.
    **dict.fromkeys(("close_timeout", "heartbeat_timeout", "read_timeout"), seconds),
    "is_host": lambda text: _TRUTH[text.lower()],
    "store_type": {"tcp": "tcp"}.__getitem__,  # hosts meet at --rdzv-endpoint, not in a file
    **dict.fromkeys(("cacert", "cert", "key", "user", "password_file"), str),
}
"""The keys of --rdzv-conf."""


def config(text: str) -> dict[str, object]:
    """Read the settings of a rendezvous."""
    found: dict[str, object] = {}
    for part in filter(None, text.split(",")):
        key, _, value = (x.strip() for x in part.partition("="))
        if key not in _CONFIG:
            raise ArgumentTypeError(f"{key!r} is not a key; the keys are {', '.join(_CONFIG)}")
        if not value:
            raise ValueError
        found[key] = _CONFIG[key](value)
    return found

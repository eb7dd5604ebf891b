"""What the texts behind flags mean: pure functions from a text to a value.

The same functions read the command line and the variables `PET_*`. Each raises `ValueError` with
what would have been right; who calls says which flag or variable it was.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Mapping
from difflib import get_close_matches

from dure.launch import Std, StreamChoice

_STREAM = re.compile(r"[0-3]")
_STREAM_OF_RANK = re.compile(r"(\d+):([0-3])")
_HOST = re.compile(r"[\w.:-]+")


def number(least: int) -> Callable[[str], int]:
    """Return a reader of whole numbers from `least` up."""

    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?\d+", text.strip()) or int(text) < least:
            raise ValueError(f"a whole number from {least} up")
        return int(text)

    return read


def seconds(text: str) -> float:
    """Read a time of zero seconds or more."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError("a number of seconds, zero or more")
    return value


def choice(*known: str) -> Callable[[str], str]:
    """Return a reader of one of some words."""

    def read(text: str) -> str:
        if text in known:
            return text
        near = get_close_matches(text, known, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"one of {', '.join(known)}{hint}")

    return read


def nproc(text: str) -> int | str:
    """Read a number of ranks, or the word for what to count."""
    try:
        return (
            int(text) if text.lstrip("+-").isdigit() else choice("auto", "cpu", "gpu", "xpu")(text)
        )
    except ValueError as error:
        raise ValueError(f"a number, or {error}") from None


def backend(text: str) -> str:
    """Read where the hosts meet; of etcd only the interface with transactions."""
    if text == "etcd-v2":
        raise ValueError("c10d, static or etcd (interface 3: etcd-v2 has no transactions)")
    return choice("c10d", "static", "etcd")(text)


def switch(text: str) -> bool:
    """Read a `PET_*` variable of a flag without a value: any number but 0 sets it."""
    try:
        return bool(int(text))
    except ValueError:
        raise ValueError("0 or 1") from None


def truth(text: str) -> bool:
    """Read a yes or no of --rdzv-conf."""
    if text.lower() in {"1", "true", "t", "yes", "y"}:
        return True
    if text.lower() in {"0", "false", "f", "no", "n"}:
        return False
    raise ValueError("1 or 0 (or true, false)")


def store_type(text: str) -> str:
    """Read the kind of torchrun's store, of which only one is here."""
    if text.lower() != "tcp":
        raise ValueError("tcp: hosts meet at --rdzv-endpoint, not in a file")
    return text


def event_log(text: str) -> str:
    """Read torchrun's handler of events, of which only the one that does nothing is here."""
    if text != "null":
        raise ValueError(
            "null: handlers are torch's own; with --log-dir the events of a job are in its "
            "events.jsonl"
        )
    return text


def nnodes(text: str) -> tuple[int, int]:
    """Read `2`, exactly two hosts, or `1:4`, from one to four."""
    least, colon, most = text.partition(":")
    try:
        return int(least), int(most if colon else least)
    except ValueError:
        raise ValueError("a number, or MIN:MAX") from None


def endpoint(text: str, default_port: int | None = None) -> str:
    """Return HOST:PORT of `text`, which may leave out the port if there is a `default_port`."""
    text = text.strip()
    host, colon, port = text.rpartition(":")
    if text.endswith("]") or not colon:
        host, port = text, str(default_port or "")
    bare = host.removeprefix("[").removesuffix("]")
    if not _HOST.fullmatch(bare) or not port.isdecimal() or int(port) >= 1 << 16:
        raise ValueError("HOST:PORT, with an IPv6 address in brackets")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def streams(text: str) -> StreamChoice:
    """Read `3` (both streams of every rank), or `0:1,1:2` (rank 0's output, rank 1's errors)."""
    if _STREAM.fullmatch(text):
        return Std(int(text))
    found: dict[int, Std] = {}
    for part in text.split(","):
        match = _STREAM_OF_RANK.fullmatch(part)
        if match is None:
            raise ValueError("0 (none), 1 (stdout), 2 (stderr), 3 (both), or RANK:NUMBER,...")
        found[int(match[1])] = Std(int(match[2]))
    return found


def ranks(text: str) -> frozenset[int] | None:
    """Read `0,2` as local ranks; an empty text means all."""
    if not text.strip():
        return None
    try:
        return frozenset(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError("local ranks, such as 0,2") from None


def words(text: str) -> tuple[str, ...]:
    """Read a list with commas, in which a doubled comma is one that belongs to a word."""
    mark = "\0"
    return tuple(x.replace(mark, ",") for x in text.replace(",,", mark).split(",") if x)


def signals(text: str) -> tuple[int, ...]:
    """Read names of signals, such as SIGTERM,SIGUSR1."""
    found: list[int] = []
    for name in text.split(","):
        try:
            found.append(signal.Signals[name.strip().upper()])
        except KeyError:
            raise ValueError(
                f"names of signals with commas; there is no {name.strip()!r}"
            ) from None
        if found[-1] in (signal.SIGKILL, signal.SIGSTOP):
            raise ValueError(f"signals that can be caught, which {name.strip()} cannot")
    return tuple(dict.fromkeys(found))


def config(
    known: Mapping[str, Callable[[str], object]], refused: Mapping[str, str]
) -> Callable[[str], dict[str, object]]:
    """Return a reader of KEY=VALUE,... with keys in `known`; `refused` says why some are not."""

    def read(text: str) -> dict[str, object]:
        found: dict[str, object] = {}
        for part in filter(None, text.split(",")):
            key, _, value = (x.strip() for x in part.partition("="))
            if not key or not value:
                raise ValueError("KEY=VALUE,...")
            if key in refused:
                raise ValueError(f"without {key}: {refused[key]}")
            if key not in known:
                raise ValueError(f"KEY=VALUE,... with keys among {', '.join(known)}; not {key}")
            try:
                found[key] = known[key](value)
            except ValueError as error:
                raise ValueError(f"{key}={error}") from None
        return found

    return read

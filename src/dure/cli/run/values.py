"""What the texts of flags mean: functions from a text to a value.

The same functions read the command line and the variables `PET_*`. Each raises argparse's
`ArgumentTypeError` with what the text must be.
"""

from __future__ import annotations

import re
import signal
from argparse import ArgumentTypeError
from collections.abc import Callable

from dure.launch import Std, StreamChoice

_STREAM = re.compile(r"[0-3]")
_STREAM_OF_RANK = re.compile(r"(\d+):([0-3])")
_HOST = re.compile(r"[\w.:-]+")


def whole_number(least: int) -> Callable[[str], int]:
    """Return a reader of whole numbers from `least` up."""

    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?\d+", text.strip()) or int(text) < least:
            raise ArgumentTypeError(f"a whole number of at least {least}")
        return int(text)

    return read


def size(text: str) -> int:
    """Read a number of bytes: 1000000, 500K, 100M, 2G (powers of 1024)."""
    found = re.fullmatch(r"([1-9][0-9]{0,15})([KMG]?)(i?B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise ArgumentTypeError("a size, such as 500K, 100M or 2G")
    return int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[found[2].upper()]


def seconds(text: str) -> float:
    """Read a duration in seconds."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ArgumentTypeError("a number of seconds, zero or more")
    return value


def positive_seconds(text: str) -> float:
    """Read a duration in seconds that is not 0."""
    value = seconds(text)
    if value == 0:
        raise ArgumentTypeError("a number of seconds, more than zero")
    return value


def choice(*known: str) -> Callable[[str], str]:
    """Return a reader of one of these words."""

    def read(text: str) -> str:
        if text not in known:
            raise ArgumentTypeError(f"one of {', '.join(known)}")
        return text

    return read


def nproc(text: str) -> int | str:
    """Read a number of ranks, or a kind of device that is counted later."""
    if text.lstrip("+-").isdigit():
        return int(text)
    if text not in ("auto", "cpu", "gpu", "xpu"):
        raise ArgumentTypeError("a number, or one of auto, cpu, gpu, xpu")
    return text


def backend(text: str) -> str:
    """Read the name of a rendezvous backend."""
    if text == "etcd-v2":
        raise ArgumentTypeError("c10d, static or etcd (interface 3: etcd-v2 has no transactions)")
    return choice("c10d", "static", "etcd")(text)


def event_log(text: str) -> str:
    """Read the name of an event handler: only torch's `null` is available."""
    if text != "null":
        raise ArgumentTypeError(
            "null, because handlers are plug-ins of torch's; with --log-dir the events of a job "
            "are in its events.jsonl"
        )
    return text


def logs_specs(text: str) -> str:
    """Refuse torchrun's plug-ins for log files."""
    raise ArgumentTypeError(
        "left out: plug-ins of torch's for log files are not supported. Use --log-dir, "
        "--redirects and --tee, or JobSpec(on_line=...) from Python"
    )


def nnodes(text: str) -> tuple[int, int]:
    """Read `2`, exactly two hosts, or `1:4`, from one to four."""
    least, colon, most = text.partition(":")
    try:
        return int(least), int(most if colon else least)
    except ValueError:
        raise ArgumentTypeError("a number, or MIN:MAX") from None


def endpoint(text: str, default_port: int) -> str:
    """Return HOST:PORT of `text`, which may leave out the port."""
    text = text.strip()
    host, colon, port = text.rpartition(":")
    if text.endswith("]") or not colon:
        host, port = text, str(default_port)
    bare = host.removeprefix("[").removesuffix("]")
    if not _HOST.fullmatch(bare) or not port.isdecimal() or int(port) >= 1 << 16:
        raise ArgumentTypeError("HOST:PORT, with an IPv6 address in brackets")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def streams(text: str) -> StreamChoice:
    """Read `3` (both streams of every rank), or `0:1,1:2` (rank 0's output, rank 1's errors)."""
    if _STREAM.fullmatch(text):
        return Std(int(text))
    found: dict[int, Std] = {}
    for part in text.split(","):
        match = _STREAM_OF_RANK.fullmatch(part)
        if match is None:
            raise ArgumentTypeError(
                "0 (none), 1 (stdout), 2 (stderr), 3 (both), or RANK:NUMBER,..."
            )
        found[int(match[1])] = Std(int(match[2]))
    return found


def ranks(text: str) -> frozenset[int] | None:
    """Read `0,2` as local ranks; an empty text means all."""
    if not text.strip():
        return None
    try:
        return frozenset(int(part) for part in text.split(","))
    except ValueError:
        raise ArgumentTypeError("local ranks, such as 0,2") from None


def words(text: str) -> tuple[str, ...]:
    """Read a list with commas, in which a doubled comma is one that belongs to a word."""
    mark = "\0"
    return tuple(x.replace(mark, ",") for x in text.replace(",,", mark).split(",") if x)


def signals(text: str) -> tuple[int, ...]:
    """Read names of signals with commas between."""
    found: list[int] = []
    for name in text.split(","):
        try:
            found.append(signal.Signals[name.strip().upper()])
        except KeyError:
            raise ArgumentTypeError(
                f"names of signals, such as SIGTERM,SIGINT ({name} is unknown)"
            ) from None
        if found[-1] in (signal.SIGKILL, signal.SIGSTOP):
            raise ArgumentTypeError(f"signals that can be caught, which {name.strip()} cannot")
    return tuple(dict.fromkeys(found))


def _truth(text: str) -> bool:
    if text.lower() in {"1", "true", "t", "yes", "y"}:
        return True
    if text.lower() in {"0", "false", "f", "no", "n"}:
        return False
    raise ArgumentTypeError("1 or 0 (or true, false)")


def _store_type(text: str) -> str:
    if text.lower() != "tcp":
        raise ArgumentTypeError("tcp: hosts meet at --rdzv-endpoint, not in a file")
    return text


_CONFIG: dict[str, Callable[[str], object]] = {
    **dict.fromkeys(("join_timeout", "timeout", "last_call_timeout"), seconds),
    "is_host": _truth,
    **dict.fromkeys(("cacert", "cert", "key", "user", "password_file"), str),
    "store_type": _store_type,
    # These have no effect: a host that has gone is noticed by the end of its connection, and
    # nothing waits for a rendezvous to close.
    **dict.fromkeys(("close_timeout", "heartbeat_timeout", "read_timeout"), seconds),
    # How long a launcher may be silent: its lease, or torch's interval times its attempts.
    **dict.fromkeys(("lease", "keep_alive_interval", "keep_alive_max_attempt"), seconds),
}
"""The keys of --rdzv-conf."""


def config(text: str) -> dict[str, object]:
    """Read the settings of a rendezvous."""
    found: dict[str, object] = {}
    for part in filter(None, text.split(",")):
        key, _, value = (x.strip() for x in part.partition("="))
        if not key or not value:
            raise ArgumentTypeError("KEY=VALUE,...")
        if key == "quorum":
            raise ArgumentTypeError(
                "without quorum, which is not supported: the launcher at the endpoint decides"
            )
        if key not in _CONFIG:
            known = ", ".join(_CONFIG)
            raise ArgumentTypeError(f"KEY=VALUE,... with keys among {known}; not {key}")
        try:
            found[key] = _CONFIG[key](value)
        except ArgumentTypeError as error:
            raise ArgumentTypeError(f"{key}={error}") from None
    return found

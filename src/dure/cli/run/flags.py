"""The flags of `dure run`, as data, and what their texts mean: functions from a text to a value.

Whatever torchrun understands stands here. `help.txt` says what each flag does, and docs/launch.md
what is not as in torchrun; tests walk torch's own parser and both texts, and fail if a flag is
missing. Dashes and underscores in a spelling are one to the reader, so the table holds dashes only.

The same functions read the command line and the variables `PET_*`. Each raises `ValueError` with
what would have been right; who calls says which flag or variable it was.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path

from dure.launch import Std, StreamChoice

_STREAM = re.compile(r"[0-3]")
_STREAM_OF_RANK = re.compile(r"(\d+):([0-3])")
_HOST = re.compile(r"[\w.:-]+")


def number(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?\d+", text.strip()) or int(text) < least:
            raise ValueError(f"a whole number from {least} up")
        return int(text)

    return read


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError("a number of seconds, zero or more")
    return value


def choice(*known: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text in known:
            return text
        near = get_close_matches(text, known, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"one of {', '.join(known)}{hint}")

    return read


def nproc(text: str) -> int | str:
    if text.lstrip("+-").isdigit():
        return int(text)
    try:
        return choice("auto", "cpu", "gpu", "xpu")(text)
    except ValueError as error:
        raise ValueError(f"a number, or {error}") from None


def backend(text: str) -> str:
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
    if text.lower() in {"1", "true", "t", "yes", "y"}:
        return True
    if text.lower() in {"0", "false", "f", "no", "n"}:
        return False
    raise ValueError("1 or 0 (or true, false)")


def store_type(text: str) -> str:
    if text.lower() != "tcp":
        raise ValueError("tcp: hosts meet at --rdzv-endpoint, not in a file")
    return text


def event_log(text: str) -> str:
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


def endpoint(text: str, default_port: int) -> str:
    """Return HOST:PORT of `text`, which may leave out the port."""
    text = text.strip()
    host, colon, port = text.rpartition(":")
    if text.endswith("]") or not colon:
        host, port = text, str(default_port)
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
    found: list[int] = []
    for name in text.split(","):
        try:
            found.append(signal.Signals[name.strip().upper()])
        except KeyError:
            raise ValueError(f"names of signals with commas; there is no {name!r}") from None
        if found[-1] in (signal.SIGKILL, signal.SIGSTOP):
            raise ValueError(f"signals that can be caught, which {name.strip()} cannot")
    return tuple(dict.fromkeys(found))


_CONFIG: dict[str, Callable[[str], object]] = {
    **dict.fromkeys(("join_timeout", "timeout", "last_call_timeout"), seconds),
    "is_host": truth,
    **dict.fromkeys(("cacert", "cert", "key", "user", "password_file"), str),
    "store_type": store_type,
    # These change nothing: a host that has gone is noticed by the end of its connection, and
    # nothing waits for a rendezvous to close.
    **dict.fromkeys(("close_timeout", "heartbeat_timeout", "read_timeout"), seconds),
    **dict.fromkeys(("keep_alive_interval", "keep_alive_max_attempt"), seconds),
}
"""The keys of --rdzv-conf."""


def config(text: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for part in filter(None, text.split(",")):
        key, _, value = (x.strip() for x in part.partition("="))
        if not key or not value:
            raise ValueError("KEY=VALUE,...")
        if key == "quorum":
            raise ValueError(
                "without quorum: parts of a job are not counted: the launcher at the endpoint "
                "decides, and with --rdzv-backend etcd the etcd servers' majority"
            )
        if key not in _CONFIG:
            raise ValueError(f"KEY=VALUE,... with keys among {', '.join(_CONFIG)}; not {key}")
        try:
            found[key] = _CONFIG[key](value)
        except ValueError as error:
            raise ValueError(f"{key}={error}") from None
    return found


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag.

    Args:
        name: What its value is called; where that is a field of `JobSpec`, it is the field's.
        spellings: How it is written, with spaces between. Messages name the first; torchrun's is
            the last.
        parse: From the text to the value; None for a switch, which takes no text.
        sets: The value of a switch that is given.
        torchrun: torchrun has it, too.
        pet: A variable `PET_...` stands in for it: the name of torchrun's spelling.
        repeats: It may be given several times, and its value is the tuple of all.
        refused: What a user is told who gives it, where it is torchrun's alone.
    """

    name: str
    spellings: str
    parse: Callable[[str], object] | None = None
    sets: object = True
    torchrun: bool = False
    pet: bool = False
    repeats: bool = False
    refused: str = ""

    @property
    def torchruns(self) -> str:
        return self.spellings.split()[-1] if self.torchrun else ""

    @property
    def variable(self) -> str:
        return "PET_" + self.torchruns[2:].replace("-", "_").upper() if self.pet else ""


_pet = partial(Flag, torchrun=True, pet=True)
_BINDINGS = choice("node", "socket", "exclusive", "core-complex")

FLAGS: tuple[Flag, ...] = (
    # What to start
    _pet("nproc", "--nproc -n --nproc-per-node", nproc),
    _pet("module", "-m --module"),
    _pet("no_python", "--no-python"),
    _pet("run_path", "--run-path"),
    _pet("role", "--role", str),
    # Several hosts
    Flag("hosts", "--hosts", str),
    Flag("hostfile", "--hostfile", Path),
    Flag("dry_run", "--dry-run"),
    Flag("exports", "-x --export", str, repeats=True),
    Flag("remote_python", "--remote-python", str),
    Flag("ssh_options", "--ssh-option", str, repeats=True),
    Flag("leash", "--leash"),
    _pet("nnodes", "--nnodes", nnodes),
    _pet("endpoint", "--rdzv-endpoint", str),
    _pet("run_id", "--rdzv-id", str),
    _pet("backend", "--rdzv-backend", backend),
    _pet("config", "--rdzv-conf", config),
    _pet("node_rank", "--node-rank", number(0)),
    _pet("master_addr", "--master-addr", str),
    _pet("master_port", "--master-port", number(1)),
    _pet("local_addr", "--local-addr", str),
    _pet("standalone", "--standalone"),
    # Failures and restarts
    _pet("max_restarts", "--max-restarts", number(0)),
    Flag("elastic", "--elastic"),
    Flag("min_ranks", "--min-ranks", number(1)),
    Flag("keep_going", "--keep-going"),
    _pet("grace_s", "--timeout-term --shutdown-timeout", seconds),
    _pet("signals", "--signals-to-handle", signals),
    # Output and files
    _pet("log_dir", "--log-dir", Path),
    _pet("redirects", "-r --redirects", streams),
    _pet("tee", "-t --tee", streams),
    _pet("local_ranks_filter", "--local-ranks-filter", ranks),
    _pet("stdout_filters", "--duplicate-stdout-filters", words),
    _pet("stderr_filters", "--duplicate-stderr-filters", words),
    Flag("prefix", "--prefix", choice("auto", "rank", "host", "none")),
    Flag("fold", "--no-fold", sets=False),
    Flag("live", "--live"),
    Flag("page", "--page"),
    Flag("trace_dir", "--trace-dir", Path),
    # Cores, devices, processes
    Flag("numa", "--numa-binding", _BINDINGS, torchrun=True),
    _pet("virtual_local_rank", "--virtual-local-rank"),
    Flag("oversubscribe", "--oversubscribe"),
    Flag("malloc_defaults", "--malloc-defaults"),
    Flag("zygote", "--no-zygote", sets="never"),
    Flag("preload", "--preload", words),
    # Who may join
    Flag("key_file", "--key-file", Path),
    Flag("key_stdin", "--key-stdin"),
    # Taken for torchrun's sake
    _pet("monitor_interval", "--monitor-interval", seconds),
    _pet("start_method", "--start-method", choice("spawn", "fork", "forkserver")),
    _pet("event_log_handler", "--event-log-handler", event_log),
    Flag("use_env", "--use-env", torchrun=True),
    Flag(
        "logs_specs",
        "--logs-specs",
        str,
        torchrun=True,
        refused="it names a plug-in of torch's for its own log files. Use --log-dir, --redirects "
        "and --tee, or JobSpec(on_line=...) from Python.",
    ),
)


def find(spelling: str) -> Flag | None:
    plain = spelling.replace("_", "-")
    return next((flag for flag in FLAGS if plain in flag.spellings.split()), None)

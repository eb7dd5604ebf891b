"""The flags of `dure run`, as data: the command line, its help, `PET_*` and docs are made of them.

Whatever torchrun understands stands here, with what is different: first how each flag is written
and read, a line each, then what it means. A test walks torch's own parser and fails if one is
missing. Dashes and underscores in a spelling are one to the reader, so the table holds dashes only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dure.cli.run.values import (
    backend,
    choice,
    config,
    event_log,
    nnodes,
    nproc,
    number,
    ranks,
    seconds,
    signals,
    store_type,
    streams,
    truth,
    words,
)

__all__ = ["FLAGS", "GROUPS", "Flag", "find"]


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag: a plain one takes a text; a switch has no `metavar` and takes nothing.

    Args:
        name: What its value is called; where that is a field of `JobSpec`, it is the field's.
        spellings: How it is written, with spaces between. Messages name the first; torchrun's is
            the last.
        metavar: What stands for the text in the help; empty for a switch.
        parse: From the text to the value.
        default: What happens without it, in words or as the text that would mean the same.
        sets: The value of a switch that is given.
        torchrun: torchrun has it, too.
        pet: A variable `PET_...` stands in for it: the name of torchrun's spelling.
        repeats: It may be given several times, and its value is the tuple of all.
    """

    name: str
    spellings: str
    metavar: str = ""
    parse: Callable[[str], object] = str
    default: str = ""
    sets: object = True
    torchrun: bool = False
    pet: bool = False
    repeats: bool = False

    @property
    def is_switch(self) -> bool:
        """Whether the flag takes no text."""
        return not self.metavar

    @property
    def torchruns(self) -> str:
        """The spelling in torchrun; empty if the flag is Dure's own."""
        return self.spellings.split()[-1] if self.torchrun else ""

    @property
    def variable(self) -> str:
        """The name of its variable, or an empty text."""
        return "PET_" + self.torchruns[2:].replace("-", "_").upper() if self.pet else ""

    @property
    def means(self) -> str:
        """What it does."""
        return _MEANS[self.name]

    @property
    def differs(self) -> str:
        """In what it is not torchrun's; empty if in nothing."""
        return _DIFFERS.get(self.name, "")

    @property
    def refused(self) -> str:
        """What a user is told who gives it, where it is torchrun's alone."""
        return _REFUSED.get(self.name, "")


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
_GONE = {
    "quorum": "parts of a job are not counted: the launcher at the endpoint decides, and with "
    "--rdzv-backend etcd the etcd servers' majority"
}
_BINDINGS = ("node", "socket", "exclusive", "core-complex")
_PREFIXES = ("auto", "rank", "host", "none")
_STARTS = ("spawn", "fork", "forkserver")
_pet = partial(Flag, torchrun=True, pet=True)

GROUPS: dict[str, tuple[Flag, ...]] = {
    "What to start": (
        _pet("nproc", "--nproc -n --nproc-per-node", "N|auto|cpu|gpu|xpu", nproc, "1"),
        _pet("module", "-m --module"),
        _pet("no_python", "--no-python"),
        _pet("run_path", "--run-path"),
        _pet("role", "--role", "NAME", str, "default"),
    ),
    "Several hosts": (
        Flag("hosts", "--hosts", "NODES"),
        Flag("hostfile", "--hostfile", "FILE", Path),
        Flag("dry_run", "--dry-run"),
        Flag("exports", "-x --export", "NAME[=VALUE]", repeats=True),
        Flag("remote_python", "--remote-python", "PATH", str, "the path of this one"),
        Flag("ssh_options", "--ssh-option", "OPTION", repeats=True),
        Flag("leash", "--leash"),
        _pet("nnodes", "--nnodes", "N|MIN:MAX", nnodes, "1"),
        _pet("endpoint", "--rdzv-endpoint", "HOST:PORT[,...]", str, "port 29400; of etcd 2379"),
        _pet("run_id", "--rdzv-id", "NAME", str, "made up; with several hosts: none"),
        _pet(
            "backend",
            "--rdzv-backend",
            "c10d|static|etcd",
            backend,
            "static with --node-rank or --master-addr, else c10d",
        ),
        _pet(
            "config",
            "--rdzv-conf",
            "KEY=VALUE,...",
            config(_CONFIG, _GONE),
            "join_timeout=600,last_call_timeout=5",
        ),
        _pet("node_rank", "--node-rank", "N", number(0)),
        _pet("master_addr", "--master-addr", "HOST", str, "127.0.0.1"),
        _pet("master_port", "--master-port", "PORT", number(1), "free; with several hosts 29500"),
        _pet("local_addr", "--local-addr", "ADDRESS", str, "found"),
        _pet("standalone", "--standalone"),
    ),
    "Failures and restarts": (
        _pet("max_restarts", "--max-restarts", "N", number(0), "0"),
        Flag("elastic", "--elastic"),
        Flag("min_ranks", "--min-ranks", "N", number(1), "1"),
        Flag("keep_going", "--keep-going"),
        _pet(
            "grace_s",
            "--timeout-term --shutdown-timeout",
            "SECONDS",
            seconds,
            "5 after a failure, 0.6 after Ctrl-C, 30 for ranks that catch SIGTERM",
        ),
        _pet("signals", "--signals-to-handle", "NAMES", signals, "SIGTERM,SIGINT,SIGHUP,SIGQUIT"),
    ),
    "Output and files": (
        _pet("log_dir", "--log-dir", "DIR", Path),
        _pet("redirects", "-r --redirects", "STREAMS", streams, "0"),
        _pet("tee", "-t --tee", "STREAMS", streams, "0"),
        _pet("local_ranks_filter", "--local-ranks-filter", "RANKS", ranks, "all"),
        _pet("stdout_filters", "--duplicate-stdout-filters", "WORDS", words),
        _pet("stderr_filters", "--duplicate-stderr-filters", "WORDS", words),
        Flag("prefix", "--prefix", "|".join(_PREFIXES), choice(*_PREFIXES), "auto"),
        Flag("fold", "--no-fold", sets=False),
        Flag("live", "--live"),
        Flag("trace_dir", "--trace-dir", "DIR", Path),
    ),
    "Cores, devices, processes": (
        Flag(
            "numa",
            "--numa-binding",
            "|".join(_BINDINGS),
            choice(*_BINDINGS),
            "not bound",
            torchrun=True,
        ),
        _pet("virtual_local_rank", "--virtual-local-rank"),
        Flag("oversubscribe", "--oversubscribe"),
        Flag("malloc_defaults", "--malloc-defaults"),
        Flag("zygote", "--no-zygote", sets="never"),
        Flag("preload", "--preload", "MODULES", words),
    ),
    "Who may join": (
        Flag("key_file", "--key-file", "FILE", Path),
        Flag("key_stdin", "--key-stdin"),
    ),
    "Taken for torchrun's sake": (
        _pet("monitor_interval", "--monitor-interval", "SECONDS", seconds),
        _pet("start_method", "--start-method", "|".join(_STARTS), choice(*_STARTS)),
        _pet("event_log_handler", "--event-log-handler", "null", event_log),
        Flag("use_env", "--use-env", torchrun=True),
        Flag("logs_specs", "--logs-specs", "NAME", torchrun=True),
    ),
}
"""All flags, below the headings of the help; `_MEANS` says what they do."""

_MEANS = {
    "nproc": "Ranks to start on this host; auto: one a GPU, or one a core where there are none.",
    "module": "The program is a module, as with python -m.",
    "no_python": "The program is no Python file: just start it.",
    "run_path": "The program is a Python file; comes before --no-python.",
    "role": "What the ranks find as ROLE_NAME.",
    "hosts": "Start the job on these hosts over ssh, such as node[1-4,7].",
    "hostfile": "The same from a file, a host a line; slots=N says how many ranks it gets.",
    "dry_run": "Start nothing: show the line that each host would be given.",
    "exports": "With --hosts: set this variable there, too; may be given several times.",
    "remote_python": "With --hosts: the interpreter on the hosts.",
    "ssh_options": "With --hosts: an option for ssh, such as -p2222; may be given several times.",
    "leash": "End when the standard input ends; how --hosts holds the hosts it started on.",
    "nnodes": "How many hosts take part; this command is then given on each of them.",
    "endpoint": "Where the hosts meet: one of them, and a free port there; or the etcd servers.",
    "run_id": "The job's name, the same on all hosts.",
    "backend": "c10d: hosts are numbered as they come. static: by --node-rank, and none may be "
    "missing. etcd: as c10d, and no host's loss ends the job; needs --rdzv-id.",
    "config": "join_timeout (or timeout), last_call_timeout in seconds; is_host: 1 or 0. With "
    "etcd: cacert, cert, key (files), user, password_file.",
    "node_rank": "This host's number, with --rdzv-backend static.",
    "master_addr": "The host of rank 0, with --rdzv-backend static.",
    "master_port": "One host: what ranks find as MASTER_PORT. Several: the endpoint's port.",
    "local_addr": "By which address other hosts reach this one.",
    "standalone": "One host, whatever the flags of --rdzv say.",
    "max_restarts": "How often the program may start again, counted for the whole job.",
    "elastic": "The program outlives deaths (dure.elastic): replace dead ranks, leave the others.",
    "min_ranks": "With --elastic: fewer living ranks end the job.",
    "keep_going": "A rank that fails does not end the others (see dure.shrink).",
    "grace_s": "From SIGTERM to SIGKILL when the job must end.",
    "signals": "Signals to the launcher that end the job.",
    "log_dir": "Keep each rank's output and error in files here, by restart and rank.",
    "redirects": "Streams that go to files only: 1 stdout, 2 stderr, 3 both; or 0:1,1:2 by rank.",
    "tee": "Streams that go to files and are shown, too.",
    "local_ranks_filter": "Show only what these local ranks write; files are kept of all.",
    "stdout_filters": "Keep lines of stdout with one of these words in "
    "attempt_N/filtered_stdout.log.",
    "stderr_filters": "The same for stderr, in filtered_stderr.log.",
    "prefix": "What stands before each line.",
    "fold": "Show lines that several ranks write alike as often as they come.",
    "live": "Show the progress of all ranks in one view.",
    "trace_dir": "Where ranks write their flight records, for `dure trace merge`.",
    "numa": "Bind each rank to cores: those near its GPU, or a fair share without GPUs.",
    "virtual_local_rank": "Each rank has LOCAL_RANK 0 and sees one GPU, its own.",
    "oversubscribe": "Start the ranks even where their memory is not likely to be there.",
    "malloc_defaults": "Leave the C library's malloc as it is: otherwise ranks keep the memory "
    "they free.",
    "zygote": "Start a fresh interpreter for each rank, instead of a copy of one with torch.",
    "preload": "Modules to import once for all ranks, besides torch.",
    "key_file": "The job's key; without it: DURE_JOB_KEY_FILE, your own, or a new one.",
    "key_stdin": "The first line of the standard input is the job's key, 64 hexadecimal digits.",
    "monitor_interval": "Accepted, and changes nothing: a rank's end wakes the launcher.",
    "start_method": "Accepted, and changes nothing: as in torchrun, which heeds it for functions "
    "alone. See --no-zygote.",
    "event_log_handler": "Only null: handlers are torch's own. Events are in LOG_DIR/events.jsonl.",
    "use_env": "Accepted, and changes nothing: ranks always find LOCAL_RANK "
    "(torch.distributed.launch).",
    "logs_specs": "Refused: plug-ins of torch's for its own log files.",
}
"""What each flag does."""

_DIFFERS = {
    "run_path": "Any path will do, not only an absolute one.",
    "endpoint": "With one host there is nobody to meet, and it is looked at with etcd only.",
    "backend": "With c10d and static Dure's own encrypted store is at the endpoint. etcd-v2 is "
    "refused: etcd's interface 3 is spoken.",
    "config": "close_timeout, heartbeat_timeout, read_timeout and keep_alive_* change nothing: a "
    "host's end is seen at once. quorum, store_type=file and unknown keys are refused.",
    "master_port": "With several hosts, ranks find another free port of rank 0's host as "
    "MASTER_PORT.",
    "grace_s": "The default is not 30, and fractions are taken.",
    "signals": "Ranks that have a handler for it get the signal itself, and 30 s; others SIGTERM.",
    "log_dir": "Without -r and -t both streams of all ranks are kept, and shown as well.",
    "redirects": "Without --log-dir they go to a new directory, which is named.",
    "tee": "As --redirects.",
    "stdout_filters": "As --redirects; lines of all ranks are looked at, not only of those with "
    "-t.",
    "stderr_filters": "As the one before.",
    "numa": "Works without GPUs, too.",
    "event_log_handler": "Any other handler is refused.",
}
"""In what some are not torchrun's."""

_REFUSED = {
    "logs_specs": "it names a plug-in of torch's for its own log files. Use --log-dir, --redirects "
    "and --tee, or JobSpec(on_line=...) from Python.",
}

FLAGS: tuple[Flag, ...] = tuple(flag for flags in GROUPS.values() for flag in flags)


def find(spelling: str) -> Flag | None:
    """Return the flag that is written `spelling`, with dashes or underscores."""
    plain = spelling.replace("_", "-")
    return next((flag for flag in FLAGS if plain in flag.spellings.split()), None)

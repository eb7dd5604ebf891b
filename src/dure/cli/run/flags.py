"""The flags of `dure run`, as data: the command line, its help, `PET_*` and docs are made of them.

Whatever torchrun understands stands here, with what is different. A test walks torch's own parser
and fails if one is missing. Dashes and underscores in a spelling are one to the reader, so the
table holds dashes only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
        means: What it does.
        metavar: What stands for the text in the help; empty for a switch.
        parse: From the text to the value.
        default: What happens without it, in words or as the text that would mean the same.
        sets: The value of a switch that is given.
        torchrun: torchrun has it, too.
        pet: A variable `PET_...` stands in for it: the name of torchrun's spelling.
        differs: In what it is not torchrun's.
        refused: What a user is told who gives it: torchrun's alone, and what to use instead.
        repeats: It may be given several times, and its value is the tuple of all.
    """

    name: str
    spellings: str
    means: str
    metavar: str = ""
    parse: Callable[[str], object] = str
    default: str = ""
    sets: object = True
    torchrun: bool = False
    pet: bool = False
    differs: str = ""
    refused: str = ""
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


def _pet(
    name: str,
    spellings: str,
    means: str,
    metavar: str = "",
    parse: Callable[[str], object] = str,
    default: str = "",
    differs: str = "",
) -> Flag:
    """Return a flag of torchrun's for which a variable may stand."""
    return Flag(
        name, spellings, means, metavar, parse, default, torchrun=True, pet=True, differs=differs
    )


_UNUSED = ("close_timeout", "heartbeat_timeout", "read_timeout", "keep_alive_interval")
_CONFIG: dict[str, Callable[[str], object]] = {
    **dict.fromkeys(("join_timeout", "timeout", "last_call_timeout"), seconds),
    "is_host": truth,
    **dict.fromkeys(("cacert", "cert", "key", "user", "password_file"), str),
    "store_type": store_type,
    **dict.fromkeys((*_UNUSED, "keep_alive_max_attempt"), seconds),
}
"""The keys of --rdzv-conf. Those of the last line change nothing: a host that has gone is noticed
by the end of its connection, and nothing waits for a rendezvous to close."""
_GONE = {
    "quorum": "parts of a job are not counted: the launcher at the endpoint decides, and with "
    "--rdzv-backend etcd the etcd servers' majority"
}
_NO_EFFECT = "Accepted, and changes nothing: "

GROUPS: dict[str, tuple[Flag, ...]] = {
    "What to start": (
        _pet(
            "nproc",
            "--nproc -n --nproc-per-node",
            "Ranks to start on this host; auto: one a GPU, or one a core where there are none.",
            "N|auto|cpu|gpu|xpu",
            nproc,
            "1",
        ),
        _pet("module", "-m --module", "The program is a module, as with python -m."),
        _pet("no_python", "--no-python", "The program is no Python file: just start it."),
        _pet(
            "run_path",
            "--run-path",
            "The program is a Python file; comes before --no-python.",
            differs="Any path will do, not only an absolute one.",
        ),
        _pet("role", "--role", "What the ranks find as ROLE_NAME.", "NAME", str, "default"),
    ),
    "Several hosts": (
        Flag(
            "hosts",
            "--hosts",
            "Start the job on these hosts over ssh, such as node[1-4,7].",
            "NODES",
        ),
        Flag(
            "hostfile",
            "--hostfile",
            "The same from a file, a host a line; slots=N says how many ranks it gets.",
            "FILE",
            Path,
        ),
        Flag(
            "dry_run",
            "--dry-run",
            "Start nothing: show the line that each host would be given.",
        ),
        Flag(
            "exports",
            "-x --export",
            "With --hosts: set this variable there, too; may be given several times.",
            "NAME[=VALUE]",
            repeats=True,
        ),
        Flag(
            "remote_python",
            "--remote-python",
            "With --hosts: the interpreter on the hosts.",
            "PATH",
            default="the path of this one",
        ),
        Flag(
            "ssh_options",
            "--ssh-option",
            "With --hosts: an option for ssh, such as -p2222; may be given several times.",
            "OPTION",
            repeats=True,
        ),
        Flag(
            "leash",
            "--leash",
            "End when the standard input ends; how --hosts holds the hosts it started on.",
        ),
        _pet(
            "nnodes",
            "--nnodes",
            "How many hosts take part; this command is then given on each of them.",
            "N|MIN:MAX",
            nnodes,
            "1",
        ),
        _pet(
            "endpoint",
            "--rdzv-endpoint",
            "Where the hosts meet: one of them, and a free port there; or the etcd servers.",
            "HOST:PORT[,...]",
            str,
            "port 29400; of etcd 2379",
            "With one host there is nobody to meet, and it is looked at with etcd only.",
        ),
        _pet(
            "run_id",
            "--rdzv-id",
            "The job's name, the same on all hosts.",
            "NAME",
            str,
            "made up; with several hosts: none",
        ),
        _pet(
            "backend",
            "--rdzv-backend",
            "c10d: hosts are numbered as they come. static: by --node-rank, and none may be "
            "missing. etcd: as c10d, and no host's loss ends the job; needs --rdzv-id.",
            "c10d|static|etcd",
            backend,
            "static with --node-rank or --master-addr, else c10d",
            "With c10d and static Dure's own encrypted store is at the endpoint. etcd-v2 is "
            "refused: etcd's interface 3 is spoken.",
        ),
        _pet(
            "config",
            "--rdzv-conf",
            "join_timeout (or timeout), last_call_timeout in seconds; is_host: 1 or 0. With etcd: "
            "cacert, cert, key (files), user, password_file.",
            "KEY=VALUE,...",
            config(_CONFIG, _GONE),
            "join_timeout=600,last_call_timeout=5",
            "close_timeout, heartbeat_timeout, read_timeout and keep_alive_* change nothing: a "
            "host's end is seen at once. quorum, store_type=file and unknown keys are refused.",
        ),
        _pet(
            "node_rank",
            "--node-rank",
            "This host's number, with --rdzv-backend static.",
            "N",
            number(0),
        ),
        _pet(
            "master_addr",
            "--master-addr",
            "The host of rank 0, with --rdzv-backend static.",
            "HOST",
            str,
            "127.0.0.1",
        ),
        _pet(
            "master_port",
            "--master-port",
            "One host: what ranks find as MASTER_PORT. Several: the endpoint's port.",
            "PORT",
            number(1),
            "free; with several hosts 29500",
            "With several hosts, ranks find another free port of rank 0's host as MASTER_PORT.",
        ),
        _pet(
            "local_addr",
            "--local-addr",
            "By which address other hosts reach this one.",
            "ADDRESS",
            str,
            "found",
        ),
        _pet("standalone", "--standalone", "One host, whatever the flags of --rdzv say."),
    ),
    "Failures and restarts": (
        _pet(
            "max_restarts",
            "--max-restarts",
            "How often the program may start again, counted for the whole job.",
            "N",
            number(0),
            "0",
        ),
        Flag(
            "elastic",
            "--elastic",
            "The program outlives deaths (dure.elastic): replace dead ranks, leave the others.",
        ),
        Flag(
            "min_ranks",
            "--min-ranks",
            "With --elastic: fewer living ranks end the job.",
            "N",
            number(1),
            "1",
        ),
        Flag(
            "keep_going",
            "--keep-going",
            "A rank that fails does not end the others (see dure.shrink).",
        ),
        _pet(
            "grace_s",
            "--timeout-term --shutdown-timeout",
            "From SIGTERM to SIGKILL when the job must end.",
            "SECONDS",
            seconds,
            "5 after a failure, 0.6 after Ctrl-C, 30 for ranks that catch SIGTERM",
            "The default is not 30, and fractions are taken.",
        ),
        _pet(
            "signals",
            "--signals-to-handle",
            "Signals to the launcher that end the job.",
            "NAMES",
            signals,
            "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
            "Ranks that have a handler for it get the signal itself, and 30 s; others SIGTERM.",
        ),
    ),
    "Output and files": (
        _pet(
            "log_dir",
            "--log-dir",
            "Keep each rank's output and error in files here, by restart and rank.",
            "DIR",
            Path,
            differs="Without -r and -t both streams of all ranks are kept, and shown as well.",
        ),
        _pet(
            "redirects",
            "-r --redirects",
            "Streams that go to files only: 1 stdout, 2 stderr, 3 both; or 0:1,1:2 by rank.",
            "STREAMS",
            streams,
            "0",
            "Without --log-dir they go to a new directory, which is named.",
        ),
        _pet(
            "tee",
            "-t --tee",
            "Streams that go to files and are shown, too.",
            "STREAMS",
            streams,
            "0",
            "As --redirects.",
        ),
        _pet(
            "local_ranks_filter",
            "--local-ranks-filter",
            "Show only what these local ranks write; files are kept of all.",
            "RANKS",
            ranks,
            "all",
        ),
        _pet(
            "stdout_filters",
            "--duplicate-stdout-filters",
            "Keep lines of stdout with one of these words in attempt_N/filtered_stdout.log.",
            "WORDS",
            words,
            differs="As --redirects; lines of all ranks are looked at, not only of those with -t.",
        ),
        _pet(
            "stderr_filters",
            "--duplicate-stderr-filters",
            "The same for stderr, in filtered_stderr.log.",
            "WORDS",
            words,
            differs="As the one before.",
        ),
        Flag(
            "prefix",
            "--prefix",
            "What stands before each line.",
            "auto|rank|host|none",
            choice("auto", "rank", "host", "none"),
            "auto",
        ),
        Flag(
            "fold",
            "--no-fold",
            "Show lines that several ranks write alike as often as they come.",
            sets=False,
        ),
        Flag("live", "--live", "Show the progress of all ranks in one view."),
        Flag(
            "trace_dir",
            "--trace-dir",
            "Where ranks write their flight records, for `dure trace merge`.",
            "DIR",
            Path,
        ),
    ),
    "Cores, devices, processes": (
        Flag(
            "numa",
            "--numa-binding",
            "Bind each rank to cores: those near its GPU, or a fair share without GPUs.",
            "node|socket|exclusive|core-complex",
            choice("node", "socket", "exclusive", "core-complex"),
            "not bound",
            torchrun=True,
            differs="Works without GPUs, too.",
        ),
        _pet(
            "virtual_local_rank",
            "--virtual-local-rank",
            "Each rank has LOCAL_RANK 0 and sees one GPU, its own.",
        ),
        Flag(
            "oversubscribe",
            "--oversubscribe",
            "Start the ranks even where their memory is not likely to be there.",
        ),
        Flag(
            "malloc_defaults",
            "--malloc-defaults",
            "Leave the C library's malloc as it is: otherwise ranks keep the memory they free.",
        ),
        Flag(
            "zygote",
            "--no-zygote",
            "Start a fresh interpreter for each rank, instead of a copy of one with torch.",
            sets="never",
        ),
        Flag(
            "preload",
            "--preload",
            "Modules to import once for all ranks, besides torch.",
            "MODULES",
            words,
        ),
    ),
    "Who may join": (
        Flag(
            "key_file",
            "--key-file",
            "The job's key; without it: DURE_JOB_KEY_FILE, your own, or a new one.",
            "FILE",
            Path,
        ),
        Flag(
            "key_stdin",
            "--key-stdin",
            "The first line of the standard input is the job's key, 64 hexadecimal digits.",
        ),
    ),
    "Taken for torchrun's sake": (
        _pet(
            "monitor_interval",
            "--monitor-interval",
            _NO_EFFECT + "a rank's end wakes the launcher.",
            "SECONDS",
            seconds,
        ),
        _pet(
            "start_method",
            "--start-method",
            _NO_EFFECT + "as in torchrun, which heeds it for functions alone. See --no-zygote.",
            "spawn|fork|forkserver",
            choice("spawn", "fork", "forkserver"),
        ),
        _pet(
            "event_log_handler",
            "--event-log-handler",
            "Only null: handlers are torch's own. Events are in LOG_DIR/events.jsonl.",
            "null",
            event_log,
            differs="Any other handler is refused.",
        ),
        Flag(
            "use_env",
            "--use-env",
            _NO_EFFECT + "ranks always find LOCAL_RANK (torch.distributed.launch).",
            torchrun=True,
        ),
        Flag(
            "logs_specs",
            "--logs-specs",
            "Refused: plug-ins of torch's for its own log files.",
            "NAME",
            torchrun=True,
            refused="it names a plug-in of torch's for its own log files. Use --log-dir, "
            "--redirects and --tee, or JobSpec(on_line=...) from Python.",
        ),
    ),
}
"""All flags, below the headings of the help."""

FLAGS: tuple[Flag, ...] = tuple(flag for flags in GROUPS.values() for flag in flags)


def find(spelling: str) -> Flag | None:
    """Return the flag that is written `spelling`, with dashes or underscores."""
    plain = spelling.replace("_", "-")
    return next((flag for flag in FLAGS if plain in flag.spellings.split()), None)

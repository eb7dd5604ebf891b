"""The flags of `dure run`, as data.

Whatever torchrun understands stands here, with the variable `PET_*` that may replace it and with
what is different. A test walks torch's own parser and fails if one is missing.
"""

from __future__ import annotations

from pathlib import Path

from dure.cli.run.flag import Flag, Group
from dure.cli.run.values import (
    choice,
    config,
    nnodes,
    number,
    ranks,
    seconds,
    signals,
    streams,
    words,
)

__all__ = ["FLAGS", "find"]

_NO_EFFECT = "Accepted, and changes nothing: "


def _truth(text: str) -> bool:
    if text.lower() in {"1", "true", "t", "yes", "y"}:
        return True
    if text.lower() in {"0", "false", "f", "no", "n"}:
        return False
    raise ValueError("true or false")


def _store_type(text: str) -> str:
    if text.lower() != "tcp":
        raise ValueError("tcp: hosts meet at --rdzv-endpoint, not in a file")
    return text


RENDEZVOUS_CONFIG = {
    "join_timeout": seconds,
    "last_call_timeout": seconds,
    "timeout": seconds,
    "is_host": _truth,
    "store_type": _store_type,
    **dict.fromkeys(("close_timeout", "heartbeat_timeout", "read_timeout"), seconds),
    **dict.fromkeys(("keep_alive_interval", "keep_alive_max_attempt"), seconds),
}
"""The keys of --rdzv-conf. Those of the last two lines change nothing: a host that has gone is
noticed by the end of its connection, and nothing waits for a rendezvous to close."""


def _backend(text: str) -> str:
    if text in {"c10d", "static"}:
        return text
    if text.startswith("etcd"):
        raise ValueError(
            "c10d or static: no etcd is needed, for the hosts meet at --rdzv-endpoint HOST:PORT, "
            "where HOST is one of them"
        )
    raise ValueError("c10d or static")


def _nproc(text: str) -> int | str:
    try:
        return int(text)
    except ValueError:
        return choice("auto", "cpu", "gpu", "xpu")(text)


def _event_log(text: str) -> str:
    if text != "null":
        raise ValueError(
            "null: handlers are torch's own; with --log-dir the events of a job are in its "
            "events.jsonl"
        )
    return text


_PROGRAM = (
    Flag(
        name="nproc",
        spellings=("--nproc", "-n", "--nproc-per-node"),
        group=Group.PROGRAM,
        metavar="N|auto|cpu|gpu|xpu",
        parse=_nproc,
        default="1",
        means="Ranks to start on this host; auto: one a GPU, or one a core where there are none.",
        torchrun="--nproc-per-node",
        pet="NPROC_PER_NODE",
    ),
    Flag(
        name="module",
        spellings=("-m", "--module"),
        group=Group.PROGRAM,
        means="The program is a module, as with python -m.",
        torchrun="--module",
        pet="MODULE",
    ),
    Flag(
        name="no_python",
        spellings=("--no-python",),
        group=Group.PROGRAM,
        means="The program is no Python file: just start it.",
        torchrun="--no-python",
        pet="NO_PYTHON",
    ),
    Flag(
        name="run_path",
        spellings=("--run-path",),
        group=Group.PROGRAM,
        means="The program is a Python file; comes before --no-python.",
        torchrun="--run-path",
        pet="RUN_PATH",
        differs="Any path will do, not only an absolute one.",
    ),
    Flag(
        name="role",
        spellings=("--role",),
        group=Group.PROGRAM,
        metavar="NAME",
        default="default",
        means="What the ranks find as ROLE_NAME.",
        torchrun="--role",
        pet="ROLE",
    ),
)

_HOSTS = (
    Flag(
        name="hosts",
        spellings=("--hosts",),
        group=Group.HOSTS,
        metavar="NODES",
        means="Start the job on these hosts over ssh, such as node[1-4,7].",
    ),
    Flag(
        name="hostfile",
        spellings=("--hostfile",),
        group=Group.HOSTS,
        metavar="FILE",
        parse=Path,
        means="The same from a file, a host a line; slots=N says how many ranks it gets.",
    ),
    Flag(
        name="dry_run",
        spellings=("--dry-run",),
        group=Group.HOSTS,
        means="Start nothing: show the equivalent lines for srun, mpirun, clush and torchrun.",
    ),
    Flag(
        name="exports",
        spellings=("-x", "--export"),
        group=Group.HOSTS,
        metavar="NAME[=VALUE]",
        means="With --hosts: set this variable there, too; may be given several times.",
        repeats=True,
    ),
    Flag(
        name="remote_python",
        spellings=("--remote-python",),
        group=Group.HOSTS,
        metavar="PATH",
        default="the path of this one",
        means="With --hosts: the interpreter on the hosts.",
    ),
    Flag(
        name="ssh_options",
        spellings=("--ssh-option",),
        group=Group.HOSTS,
        metavar="OPTION",
        means="With --hosts: an option for ssh, such as -p2222; may be given several times.",
        repeats=True,
    ),
    Flag(
        name="leash",
        spellings=("--leash",),
        group=Group.HOSTS,
        means="End when the standard input ends; how --hosts holds the hosts it started on.",
    ),
    Flag(
        name="nnodes",
        spellings=("--nnodes",),
        group=Group.HOSTS,
        metavar="N|MIN:MAX",
        parse=nnodes,
        default="1",
        means="How many hosts take part; this command is then given on each of them.",
        torchrun="--nnodes",
        pet="NNODES",
    ),
    Flag(
        name="endpoint",
        spellings=("--rdzv-endpoint",),
        group=Group.HOSTS,
        metavar="HOST:PORT",
        means="Where the hosts meet: one of them, and a free port there.",
        default="port 29400",
        torchrun="--rdzv-endpoint",
        pet="RDZV_ENDPOINT",
        differs="With one host there is nobody to meet, and it is not looked at.",
    ),
    Flag(
        name="run_id",
        spellings=("--rdzv-id",),
        group=Group.HOSTS,
        metavar="NAME",
        means="The job's name, the same on all hosts.",
        default="made up; with several hosts: none",
        torchrun="--rdzv-id",
        pet="RDZV_ID",
    ),
    Flag(
        name="backend",
        spellings=("--rdzv-backend",),
        group=Group.HOSTS,
        metavar="c10d|static",
        parse=_backend,
        means="c10d: hosts are numbered as they come. static: by --node-rank, and none may be "
        "missing.",
        default="static with --node-rank or --master-addr, else c10d",
        torchrun="--rdzv-backend",
        pet="RDZV_BACKEND",
        differs="Either way Dure's own encrypted store is at the endpoint. etcd is refused: none "
        "is needed.",
    ),
    Flag(
        name="config",
        spellings=("--rdzv-conf",),
        group=Group.HOSTS,
        metavar="KEY=VALUE,...",
        parse=config(RENDEZVOUS_CONFIG),
        means="join_timeout (or timeout), last_call_timeout in seconds; is_host.",
        default="join_timeout=600,last_call_timeout=5",
        torchrun="--rdzv-conf",
        pet="RDZV_CONF",
        differs="close_timeout, heartbeat_timeout, read_timeout and keep_alive_* change nothing: "
        "a host's end is seen at once. store_type=file and unknown keys are refused.",
    ),
    Flag(
        name="node_rank",
        spellings=("--node-rank",),
        group=Group.HOSTS,
        metavar="N",
        parse=number(0),
        means="This host's number, with --rdzv-backend static.",
        torchrun="--node-rank",
        pet="NODE_RANK",
    ),
    Flag(
        name="master_addr",
        spellings=("--master-addr",),
        group=Group.HOSTS,
        metavar="HOST",
        default="127.0.0.1",
        means="The host of rank 0, with --rdzv-backend static.",
        torchrun="--master-addr",
        pet="MASTER_ADDR",
    ),
    Flag(
        name="master_port",
        spellings=("--master-port",),
        group=Group.HOSTS,
        metavar="PORT",
        parse=number(1),
        default="free; with several hosts 29500",
        means="One host: what ranks find as MASTER_PORT. Several: the endpoint's port.",
        torchrun="--master-port",
        pet="MASTER_PORT",
        differs="With several hosts, ranks find another free port of rank 0's host as MASTER_PORT.",
    ),
    Flag(
        name="local_addr",
        spellings=("--local-addr",),
        group=Group.HOSTS,
        metavar="ADDRESS",
        default="found",
        means="By which address other hosts reach this one.",
        torchrun="--local-addr",
        pet="LOCAL_ADDR",
    ),
    Flag(
        name="standalone",
        spellings=("--standalone",),
        group=Group.HOSTS,
        means="One host, whatever the flags of --rdzv say.",
        torchrun="--standalone",
        pet="STANDALONE",
    ),
)

_LIFE = (
    Flag(
        name="max_restarts",
        spellings=("--max-restarts",),
        group=Group.LIFE,
        metavar="N",
        parse=number(0),
        default="0",
        means="How often the program may start again, counted for the whole job.",
        torchrun="--max-restarts",
        pet="MAX_RESTARTS",
    ),
    Flag(
        name="elastic",
        spellings=("--elastic",),
        group=Group.LIFE,
        means="The program outlives deaths (dure.elastic): replace dead ranks, leave the others.",
    ),
    Flag(
        name="min_ranks",
        spellings=("--min-ranks",),
        group=Group.LIFE,
        metavar="N",
        parse=number(1),
        default="1",
        means="With --elastic: fewer living ranks end the job.",
    ),
    Flag(
        name="keep_going",
        spellings=("--keep-going",),
        group=Group.LIFE,
        means="A rank that fails does not end the others (see dure.shrink).",
    ),
    Flag(
        name="grace",
        spellings=("--timeout-term", "--shutdown-timeout"),
        group=Group.LIFE,
        metavar="SECONDS",
        parse=seconds,
        default="5 after a failure, 0.6 after Ctrl-C, 30 for ranks that catch SIGTERM",
        means="From SIGTERM to SIGKILL when the job must end.",
        torchrun="--shutdown-timeout",
        pet="SHUTDOWN_TIMEOUT",
        differs="The default is not 30, and fractions are taken.",
    ),
    Flag(
        name="signals",
        spellings=("--signals-to-handle",),
        group=Group.LIFE,
        metavar="NAMES",
        parse=signals,
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        means="Signals to the launcher that end the job.",
        torchrun="--signals-to-handle",
        pet="SIGNALS_TO_HANDLE",
        differs="Ranks that have a handler for it get the signal itself, and 30 s; others SIGTERM.",
    ),
)

_OUTPUT = (
    Flag(
        name="log_dir",
        spellings=("--log-dir",),
        group=Group.OUTPUT,
        metavar="DIR",
        parse=Path,
        means="Keep each rank's output and error in files here, by restart and rank.",
        torchrun="--log-dir",
        pet="LOG_DIR",
        differs="Without -r and -t both streams of all ranks are kept, and shown as well.",
    ),
    Flag(
        name="redirects",
        spellings=("--redirects", "-r"),
        group=Group.OUTPUT,
        metavar="STREAMS",
        parse=streams,
        default="0",
        means="Streams that go to files only: 1 stdout, 2 stderr, 3 both; or 0:1,1:2 by rank.",
        torchrun="--redirects",
        pet="REDIRECTS",
        differs="Without --log-dir they go to a new directory, which is named.",
    ),
    Flag(
        name="tee",
        spellings=("--tee", "-t"),
        group=Group.OUTPUT,
        metavar="STREAMS",
        parse=streams,
        default="0",
        means="Streams that go to files and are shown, too.",
        torchrun="--tee",
        pet="TEE",
        differs="As --redirects.",
    ),
    Flag(
        name="filter",
        spellings=("--local-ranks-filter",),
        group=Group.OUTPUT,
        metavar="RANKS",
        parse=ranks,
        default="all",
        means="Show only what these local ranks write; files are kept of all.",
        torchrun="--local-ranks-filter",
        pet="LOCAL_RANKS_FILTER",
    ),
    Flag(
        name="stdout_filters",
        spellings=("--duplicate-stdout-filters",),
        group=Group.OUTPUT,
        metavar="WORDS",
        parse=words,
        means="Keep lines of stdout with one of these words in attempt_N/filtered_stdout.log.",
        torchrun="--duplicate-stdout-filters",
        pet="DUPLICATE_STDOUT_FILTERS",
        differs="As --redirects; lines of all ranks are looked at, not only of those with -t.",
    ),
    Flag(
        name="stderr_filters",
        spellings=("--duplicate-stderr-filters",),
        group=Group.OUTPUT,
        metavar="WORDS",
        parse=words,
        means="The same for stderr, in filtered_stderr.log.",
        torchrun="--duplicate-stderr-filters",
        pet="DUPLICATE_STDERR_FILTERS",
        differs="As the one before.",
    ),
    Flag(
        name="prefix",
        spellings=("--prefix",),
        group=Group.OUTPUT,
        metavar="auto|rank|host|none",
        parse=choice("auto", "rank", "host", "none"),
        default="auto",
        means="What stands before each line.",
    ),
    Flag(
        name="no_fold",
        spellings=("--no-fold",),
        group=Group.OUTPUT,
        means="Show lines that several ranks write alike as often as they come.",
    ),
    Flag(
        name="live",
        spellings=("--live",),
        group=Group.OUTPUT,
        means="Show the progress of all ranks in one view.",
    ),
    Flag(
        name="trace_dir",
        spellings=("--trace-dir",),
        group=Group.OUTPUT,
        metavar="DIR",
        parse=Path,
        means="Where ranks write their flight records, for `dure trace merge`.",
    ),
)

_MACHINE = (
    Flag(
        name="numa",
        spellings=("--numa-binding",),
        group=Group.MACHINE,
        metavar="node|socket|exclusive|core-complex",
        parse=choice("node", "socket", "exclusive", "core-complex"),
        default="not bound",
        means="Bind each rank to cores: those near its GPU, or a fair share without GPUs.",
        torchrun="--numa-binding",
        differs="Works without GPUs, too.",
    ),
    Flag(
        name="virtual_local_rank",
        spellings=("--virtual-local-rank",),
        group=Group.MACHINE,
        means="Each rank has LOCAL_RANK 0 and sees one GPU, its own.",
        torchrun="--virtual-local-rank",
        pet="VIRTUAL_LOCAL_RANK",
    ),
    Flag(
        name="no_zygote",
        spellings=("--no-zygote",),
        group=Group.MACHINE,
        means="Start a fresh interpreter for each rank, instead of a copy of one with torch.",
    ),
    Flag(
        name="preload",
        spellings=("--preload",),
        group=Group.MACHINE,
        metavar="MODULES",
        parse=words,
        means="Modules to import once for all ranks, besides torch.",
    ),
)

_KEY = (
    Flag(
        name="key_file",
        spellings=("--key-file",),
        group=Group.KEY,
        metavar="FILE",
        parse=Path,
        means="The job's key; without it: DURE_JOB_KEY_FILE, your own, or a new one.",
    ),
    Flag(
        name="key_stdin",
        spellings=("--key-stdin",),
        group=Group.KEY,
        means="The first line of the standard input is the job's key, 64 hexadecimal digits.",
    ),
)

_NONE = (
    Flag(
        name="monitor_interval",
        spellings=("--monitor-interval",),
        group=Group.NONE,
        metavar="SECONDS",
        parse=seconds,
        means=_NO_EFFECT + "a rank's end wakes the launcher.",
        torchrun="--monitor-interval",
        pet="MONITOR_INTERVAL",
    ),
    Flag(
        name="start_method",
        spellings=("--start-method",),
        group=Group.NONE,
        metavar="spawn|fork|forkserver",
        parse=choice("spawn", "fork", "forkserver"),
        means=_NO_EFFECT + "as in torchrun, which heeds it for functions alone. See --no-zygote.",
        torchrun="--start-method",
        pet="START_METHOD",
    ),
    Flag(
        name="event_log_handler",
        spellings=("--event-log-handler",),
        group=Group.NONE,
        metavar="null",
        parse=_event_log,
        means="Only null: handlers are torch's own. Events are in LOG_DIR/events.jsonl.",
        torchrun="--event-log-handler",
        pet="EVENT_LOG_HANDLER",
        differs="Any other handler is refused.",
    ),
    Flag(
        name="use_env",
        spellings=("--use-env",),
        group=Group.NONE,
        means=_NO_EFFECT + "ranks always find LOCAL_RANK (torch.distributed.launch).",
        torchrun="--use-env",
    ),
    Flag(
        name="logs_specs",
        spellings=("--logs-specs",),
        group=Group.NONE,
        metavar="NAME",
        means="Refused: plug-ins of torch's for its own log files.",
        torchrun="--logs-specs",
        refused="it names a plug-in of torch's for its own log files. Use --log-dir, --redirects "
        "and --tee, or JobSpec(on_line=...) from Python.",
    ),
)

FLAGS: tuple[Flag, ...] = (*_PROGRAM, *_HOSTS, *_LIFE, *_OUTPUT, *_MACHINE, *_KEY, *_NONE)
"""All flags, in the order of the help."""


def find(spelling: str) -> Flag | None:
    """Return the flag that is written `spelling`, with dashes or underscores."""
    plain = spelling.replace("_", "-")
    return next((flag for flag in FLAGS if plain in flag.spellings), None)

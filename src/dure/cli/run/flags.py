"""The flags of `dure run`, as data.

Whatever torchrun understands stands here, with the variable `PET_*` that may replace it and with
what is different. A test walks torch's own parser and fails if one is missing.
"""

from __future__ import annotations

from pathlib import Path

from dure.cli.run.flag import Flag, Group
from dure.cli.run.flags_hosts import HOSTS
from dure.cli.run.flags_output import MACHINE, OUTPUT
from dure.cli.run.values import choice, number, seconds, signals

__all__ = ["FLAGS", "find"]

_NO_EFFECT = "Accepted, and changes nothing: "


def _nproc(text: str) -> int | str:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return choice("auto", "cpu", "gpu", "xpu")(text)
    except ValueError as error:
        raise ValueError(f"a number, or {error}") from None


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

FLAGS: tuple[Flag, ...] = (*_PROGRAM, *HOSTS, *_LIFE, *OUTPUT, *MACHINE, *_KEY, *_NONE)
"""All flags, in the order of the help."""


def find(spelling: str) -> Flag | None:
    """Return the flag that is written `spelling`, with dashes or underscores."""
    plain = spelling.replace("_", "-")
    return next((flag for flag in FLAGS if plain in flag.spellings), None)

"""Every environment variable that Dure reads.

No other module uses `os.environ` (a test checks it). A variable is declared once, with its meaning;
`dure env`, the reference and error messages show it.

Three files are exempt. `launch/ranks/child.py` and `launch/ranks/forking.py` start a rank without
an import of Dure, because programs that do not use Dure must not load it; nor must ``import torch``
load more of it than `torch_backend/__init__.py`. The variables that they read are declared here as
well, which the same test checks.

Internal: names here may change in any release.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from dure.errors import RendezvousError, UsageError

__all__ = [
    "LOGGERS",
    "VARIABLES",
    "Variable",
    "check_flags",
    "child_environment",
    "debug_level",
    "describe",
    "everything",
    "flag",
    "integer",
    "log_levels",
    "put",
    "raw",
    "require",
    "set_too_late_note",
    "text",
    "unknown",
    "unknown_note",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """An environment variable."""

    name: str
    meaning: str
    example: str = ""


VARIABLES: dict[str, Variable] = {
    v.name: v
    for v in (
        Variable(
            name="RANK", meaning="this process's number, from 0 to WORLD_SIZE - 1", example="0"
        ),
        Variable(name="WORLD_SIZE", meaning="how many processes take part in the job", example="2"),
        Variable(name="LOCAL_RANK", meaning="this process's number on its host", example="0"),
        Variable(name="LOCAL_WORLD_SIZE", meaning="processes on this host", example="2"),
        Variable(name="MASTER_ADDR", meaning="host name or address of rank 0", example="127.0.0.1"),
        Variable(name="MASTER_PORT", meaning="a free TCP port on rank 0's host", example="29500"),
        Variable(name="GROUP_RANK", meaning="this host's number among the job's hosts"),
        Variable(name="GROUP_WORLD_SIZE", meaning="how many hosts take part in the job"),
        Variable(name="ROLE_NAME", meaning="the role of this process, given by the launcher"),
        Variable(name="ROLE_RANK", meaning="this process's number among those of its role"),
        Variable(name="ROLE_WORLD_SIZE", meaning="processes of this role"),
        Variable(
            name="TORCHELASTIC_USE_AGENT_STORE",
            meaning="the launcher hosts the TCP store (torchrun)",
        ),
        Variable(name="TORCHELASTIC_RUN_ID", meaning="the job's name, given by the launcher"),
        Variable(
            name="TORCHELASTIC_RESTART_COUNT", meaning="how often the launcher restarted the job"
        ),
        Variable(
            name="TORCHELASTIC_MAX_RESTARTS", meaning="how often the launcher may restart the job"
        ),
        Variable(
            name="TORCHELASTIC_HEALTH_CHECK_PORT",
            meaning="where the launcher answers probes of Kubernetes (`--health-port`)",
        ),
        Variable(
            name="TORCHELASTIC_ERROR_FILE",
            meaning="where torch's @record leaves the error of a rank",
        ),
        Variable(
            name="TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
            meaning="seconds from SIGTERM to SIGKILL, where --timeout-term is not given",
        ),
        Variable(name="PYTHONUNBUFFERED", meaning="1: print without waiting for a full buffer"),
        Variable(
            name="TORCH_DISTRIBUTED_DEBUG",
            meaning="OFF, INFO or DETAIL: shows Dure's log as DURE_LOG=info and DURE_LOG=debug do, "
            "if DURE_LOG is not set",
        ),
        Variable(name="CUDA_VISIBLE_DEVICES", meaning="the GPUs this process may use"),
        Variable(name="OMP_NUM_THREADS", meaning="threads each process may use for one operator"),
        Variable(name="GLOO_SOCKET_IFNAME", meaning="the interface used between hosts"),
        Variable(name="TP_SOCKET_IFNAME", meaning="the interface RPC uses between hosts"),
        Variable(name="NCCL_SOCKET_IFNAME", meaning="the interface NCCL uses between hosts"),
        Variable(
            name="TORCH_NCCL_ASYNC_ERROR_HANDLING",
            meaning="what torch's watchdog does after an error of NCCL; Dure's groups replace 1 "
            "(end the process), which launchers set, by 2 (abort)",
        ),
        Variable(
            name="KUBERNETES_SERVICE_HOST",
            meaning="set in every pod; names of other pods are waited for",
        ),
        Variable(name="NO_COLOR", meaning="1: no colors on the terminal"),
        Variable(name="PATH", meaning="folders of programs, such as mpirun"),
        Variable(
            name="LD_PRELOAD",
            meaning="libraries that every program loads first, such as a profiler; if it is set, "
            "ranks run the destructors of all libraries when they exit",
        ),
        Variable(name="PYTHONPATH", meaning="where Python looks for modules"),
        Variable(name="DURE_JOB_KEY_FILE", meaning="path of the job key, a file of mode 0600"),
        Variable(
            name="DURE_JOB_KEY_FD", meaning="inherited file descriptor that holds the job key"
        ),
        Variable(
            name="DURE_ETCD_PASSWORD_FD",
            meaning="inherited file descriptor that holds the user's password for etcd",
        ),
        Variable(
            name="DURE_FSDP_STRATEGY",
            meaning="shared or gathered: how fully_shard unshards parameters; else it chooses",
        ),
        Variable(name="DURE_INSECURE", meaning="1: let unauthenticated peers join (loudly)"),
        Variable(
            name="DURE_SILENCE",
            meaning="seconds without a sign of life after which another host counts as lost; 30 by "
            "default (15 for launchers), at least 2; give every host the same",
            example="30",
        ),
        Variable(name="DURE_BACKEND", meaning="the default backend, for programs that name none"),
        Variable(
            name="DURE_STAND_IN",
            meaning="gloo: in stock torch, groups of the backend gloo are Dure's; `dure run "
            "--stand-in-gloo` sets it",
            example="gloo",
        ),
        Variable(
            name="DURE_STAND_IN_QUIET",
            meaning="1: rank 0 does not report that Dure replaces gloo",
        ),
        Variable(
            name="DURE_HOST_ID",
            meaning="processes with different values count as being on different hosts",
            example="node-a",
        ),
        Variable(
            name="DURE_SINGLE_COPY",
            meaning="from how many bytes on memory is copied once, by the kernel; auto: where the "
            "ranks learn that it is quicker; off: never",
            example="auto",
        ),
        Variable(
            name="DURE_CORE_MIGRATION",
            meaning="1: a rank that shares its core with another may move its thread to an idle "
            "core; `dure run` sets it, 0 keeps it off",
            example="1",
        ),
        Variable(
            name="DURE_ISA",
            meaning="generic, avx2 or avx512: the native engine uses no instruction set above it; "
            "else the best of the processor",
            example="avx2",
        ),
        Variable(
            name="DURE_STORE_BIND", meaning="address the store listens on, if not MASTER_ADDR"
        ),
        Variable(
            name="DURE_STORE_PORT",
            meaning="port of rank 0's store under torchrun and in clusters, if not MASTER_PORT + 1",
        ),
        Variable(
            name="DURE_STORE_BIND_ANY",
            meaning="1: the store may listen on a wildcard address such as 0.0.0.0",
        ),
        # `dure run` hosts Dure's own store in the launcher and names it here, so that `env://` has
        # no port to choose and no race to lose. MASTER_ADDR and MASTER_PORT stay free for programs
        # that build a torch.distributed store, or use `tcp://`, themselves: rank 0 can bind them.
        # The rendezvous of `env://` joins DURE_STORE_ADDR (every rank as a client) if it is set.
        Variable(
            name="DURE_STORE_ADDR",
            meaning="HOST:PORT of the launcher's store, or etcd://HOST:PORT/JOB; comes "
            "before MASTER_ADDR",
            example="127.0.0.1:41234",
        ),
        Variable(name="DURE_LAUNCHER", meaning="the job's name; set by `dure run` in every rank"),
        Variable(
            name="DURE_LOG",
            meaning="which lines of Dure's log go to the standard error: a level (debug, info, "
            "warning, error), or LOGGER=LEVEL, or several separated by commas",
            example="info,dure.comm=debug",
        ),
        Variable(
            name="DURE_ELASTIC",
            meaning="1: the launcher replaces dead ranks; set by `dure run --elastic`",
        ),
        Variable(name="SLURM_JOB_ID", meaning="set by Slurm: SIGUSR1 may announce the end"),
        Variable(name="DURE_ELASTIC_MIN", meaning="fewer living ranks than these end the job"),
        Variable(
            name="DURE_TRACEBACK",
            meaning="full: tracebacks of Dure's own errors show Dure's lines, too",
            example="full",
        ),
        Variable(
            name="DURE_TEST_TIMEOUT",
            meaning="seconds that run_ranks and ProcessPool wait if they are given no timeout; "
            "30 by default",
            example="240",
        ),
        Variable(
            name="DURE_TRACE_DIR",
            meaning="where ranks write their flight records; off: not on errors",
            example="traces",
        ),
        Variable(
            name="DURE_PAGE_DIR",
            meaning="where ranks publish for the page of their run; set by `dure run --page`",
        ),
        Variable(
            name="DURE_METRICS_DIR",
            meaning="where ranks publish their counts; set by `dure run --metrics-port`",
        ),
        Variable(
            name="DURE_OTEL_MS",
            meaning="make spans of OpenTelemetry of operations that take at least so many "
            "milliseconds, of phases of steps, and of launches; not set: none",
            example="10",
        ),
        Variable(name="TRACEPARENT", meaning="the parent of spans, as W3C defines it"),
        Variable(
            name="DURE_VERIFY",
            meaning="1: ranks compare every collective over gloo or nccl before data move",
        ),
        Variable(name="OMPI_COMM_WORLD_SIZE", meaning="set by Open MPI's mpirun in every process"),
        Variable(name="MPI4PY_RC_THREAD_LEVEL", meaning="what mpi4py asks of MPI's threads"),
        Variable(name="PMI_SIZE", meaning="set by the mpiexec of MPICH and Intel MPI"),
        Variable(name="PMIX_RANK", meaning="set by launchers that speak PMIx, such as srun"),
        Variable(name="XDG_CONFIG_HOME", meaning="where the user's own key file lives"),
        Variable(name="XDG_STATE_HOME", meaning="where flight records are, without DURE_TRACE_DIR"),
        Variable(name="MALLOC_ARENA_MAX", meaning="how many heaps glibc may give to threads"),
        Variable(
            name="MALLOC_TRIM_THRESHOLD_",
            meaning="bytes of freed memory above which glibc gives it back; set by `dure run`",
        ),
        Variable(
            name="MALLOC_MMAP_THRESHOLD_",
            meaning="bytes from which on glibc maps blocks one by one; set by `dure run`",
        ),
        Variable(name="MALLOC_TOP_PAD_", meaning="what glibc adds when its heap grows"),
        Variable(name="MALLOC_MMAP_MAX_", meaning="how many blocks glibc maps one by one"),
        Variable(name="GLIBC_TUNABLES", meaning="settings of glibc, all of these among them"),
    )
}


_READ_AT_IMPORT = (
    *("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_"),
    *("ATEN_CPU_CAPABILITY", "PYTORCH_JIT", "TORCH_LOGS", "TORCH_CPP_LOG_LEVEL"),
)
"""Prefixes of the names of variables that torch and its libraries read once, when loaded."""
_SET_BY_LIBRARIES = ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK")
"""Variables with these prefixes that scikit-learn sets at its import; torch ignores them."""

_ON = frozenset({"1", "true", "yes", "on"})
_FLAGS = (
    "DURE_CORE_MIGRATION",
    "DURE_ELASTIC",
    "DURE_INSECURE",
    "DURE_STAND_IN_QUIET",
    "DURE_STORE_BIND_ANY",
    "DURE_VERIFY",
)
_OFF = frozenset({"0", "false", "no", "off"})

LOGGERS = (
    *("dure.checkpoint", "dure.comm", "dure.elastic", "dure.parallel"),
    *("dure.rpc", "dure.store", "dure.trace"),
)
"""The loggers that Dure writes to; see `dure.trace.logs`."""
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def text(name: str, default: str | None = None) -> str | None:
    """Return the variable `name`, or `default` if it is unset or empty."""
    if name not in VARIABLES:
        raise KeyError(f"{name} is not declared in dure.env")
    return os.environ.get(name) or default


def raw(name: str) -> str | None:
    """Return the variable `name`; an empty value (no GPUs) differs from an unset variable."""
    if name not in VARIABLES:
        raise KeyError(f"{name} is not declared in dure.env")
    return os.environ.get(name)


def flag(name: str) -> bool:
    """Return whether the variable `name` is on (1, true, yes, on).

    Raises:
        UsageError: It has another value, and is not off (0, false, no, off, empty, unset).
    """
    value = (text(name) or "0").strip().lower()
    if value not in _ON | _OFF:
        raise UsageError(
            f"the environment variable {name} must be 1 or 0",
            seen=f"{value!r}; it means {VARIABLES[name].meaning}",
            fix=f"Set {name}=1, or unset it.",
        )
    return value in _ON


def check_flags() -> None:
    """Raise `UsageError` if a flag has an invalid value."""
    for name in _FLAGS:
        flag(name)


def log_levels() -> dict[str, str]:
    """Return the levels of DURE_LOG by logger; "dure" is the parent of all loggers.

    Raises:
        UsageError: A part of it is neither a level nor LOGGER=LEVEL.
    """
    levels: dict[str, str] = {}
    for part in (text("DURE_LOG") or "").split(","):
        name, _, level = part.strip().rpartition("=")
        name, level = name.strip() or "dure", level.strip().upper()
        known = name == "dure" or ".".join(name.split(".")[:2]) in LOGGERS
        if not part.strip():
            continue
        if level not in _LOG_LEVELS or not known or "=" in name:
            raise UsageError(
                "DURE_LOG must be a level, or LOGGER=LEVEL, or several separated by commas",
                seen=f"{part.strip()!r}; levels are {', '.join(_LOG_LEVELS).lower()}, "
                f"loggers dure, {', '.join(LOGGERS)}",
                fix="For example DURE_LOG=info, or DURE_LOG=info,dure.comm=debug.",
            )
        levels[name] = level
    return levels


def debug_level() -> str:
    """Return the level of TORCH_DISTRIBUTED_DEBUG: OFF, INFO or DETAIL.

    Raises:
        UsageError: It is none of these.
    """
    value = (text("TORCH_DISTRIBUTED_DEBUG") or "OFF").strip().upper()
    if value not in {"OFF", "INFO", "DETAIL"}:
        raise UsageError(
            "TORCH_DISTRIBUTED_DEBUG must be OFF, INFO or DETAIL",
            seen=repr(value),
            fix="Set it to one of them, or unset it.",
        )
    return value


def unknown(environ: Mapping[str, str] | None = None) -> list[tuple[str, str]]:
    """List unknown variables that begin with DURE_, each with the most similar known name.

    Args:
        environ: The variables; None for those of this process.
    """
    ours = [name for name in VARIABLES if name.startswith("DURE_")]
    names = sorted(os.environ if environ is None else environ)
    found = [name for name in names if name.startswith("DURE_") and name not in VARIABLES]
    if not found:
        return []
    from difflib import get_close_matches  # lazy: rarely needed

    return [(name, get_close_matches(name, ours, 1, 0.0)[0]) for name in found]


def unknown_note(environ: Mapping[str, str] | None = None) -> str:
    """Return one line about the variables that `unknown` lists, "" if there are none."""
    found = [f"{name} (did you mean {nearest}?)" for name, nearest in unknown(environ)]
    if not found:
        return ""
    return f"unknown environment variables, which are ignored: {', '.join(found)}"


def set_too_late_note() -> str:
    """Return one line about variables that a forked rank set after torch had read them, or "".

    A rank that `dure run` forks has imported torch before its program begins. The line names those
    variables that torch and its libraries read at their import and that have changed since the
    rank was started. Source: docs/launch.md, "What differs".
    """
    forked = sys.modules.get("__dure_forked__")  # made by launch/ranks/forking.py
    if forked is None or forked.pid != os.getpid():
        return ""
    before: dict[str, str] = forked.environment
    late = sorted(
        name
        for name in {*before, *os.environ}
        if name.startswith(_READ_AT_IMPORT)
        and name not in _SET_BY_LIBRARIES
        and before.get(name) != os.environ.get(name)
    )
    if not late:
        return ""
    return (
        f"{', '.join(late)} changed in the program after torch was imported, which may have no "
        "effect: ranks are forked from a process that has imported torch. Set variables before "
        "`dure run`, or start every rank afresh with `dure run --no-zygote`."
    )


def parse_integer(text: str) -> int:
    """Parse a decimal integer; unlike `int`, without underscores and digits of other scripts.

    Raises:
        ValueError: It is not an integer.
    """
    if not re.fullmatch(r"\s*[+-]?[0-9]+\s*", text):
        raise ValueError(f"not an integer: {text!r}")
    return int(text)


def integer(name: str, default: int | None = None) -> int | None:
    """Return the variable `name` as an integer, or `default` if it is unset.

    Raises:
        RendezvousError: It is not an integer.
    """
    value = text(name)
    if value is None:
        return default
    try:
        return parse_integer(value)
    except ValueError:
        raise RendezvousError(
            f"the environment variable {name} must be an integer",
            seen=f"{value!r}; it means {VARIABLES[name].meaning}",
            fix=f"Set it, e.g. {name}={VARIABLES[name].example or 0}.",
        ) from None


def require(name: str, purpose: str) -> str:
    """Return the variable `name`.

    Raises:
        RendezvousError: It is unset or empty; the message has its meaning and `purpose`.
    """
    value = text(name)
    if value is None:
        v = VARIABLES[name]
        raise RendezvousError(
            f"the environment variable {name} is missing",
            seen=f"{purpose} needs it: {v.meaning}",
            fix="Start the program with `dure run --nproc 2 PROGRAM`, "
            f"or set {name}={v.example or '...'}.",
        )
    return value


def describe() -> list[tuple[str, str | None, str]]:
    """Return (name, value or None, meaning) of every variable."""
    return [(v.name, os.environ.get(v.name), v.meaning) for v in VARIABLES.values()]


def everything() -> dict[str, str]:
    """Return a copy of all variables, for the detection of clusters and for `PET_*`."""
    return dict(os.environ)


def put(name: str, value: str | None) -> None:
    """Set a variable of this process; None removes it."""
    if name not in VARIABLES:
        raise KeyError(f"{name} is not declared in dure.env")
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def child_environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return a copy of the environment for a child process; None removes a variable."""
    out = dict(os.environ)
    for name, value in changes.items():
        if value is None:
            out.pop(name, None)
        else:
            out[name] = value
    return out

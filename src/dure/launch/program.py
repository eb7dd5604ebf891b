"""What the user asked to run: checked once, before anything is started.

A mistake here is one clear line and nothing has to be ended.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping

from dure.errors import UsageError
from dure.launch.spec import JobSpec

__all__ = ["check_output", "check_program"]

_PROC = "/proc/self/fd"
_ELF = b"\x7fELF"


def check_program(spec: JobSpec) -> None:
    """Raise `UsageError` if the job cannot be started as it was asked for."""
    try:
        os.getcwd()
    except OSError as error:
        raise UsageError(
            "the working directory is gone or cannot be read",
            seen=str(error.strerror),
            fix="Change to one that is there: `cd`.",
        ) from error
    _check_numbers(spec)
    _check_hosts(spec)
    check_output(spec)
    if spec.kind == "script":
        _check_script(spec.program)
    elif spec.kind == "module":
        _check_module(spec.program)
    else:
        _check_executable(spec.program)
    _require(
        os.path.exists(_PROC),
        "ranks cannot be started here: /proc is not mounted",
        f"no {_PROC}",
        "Mount it: `mount -t proc proc /proc`.",
    )


def _require(holds: object, what: str, seen: str, fix: str = "") -> None:
    if not holds:
        raise UsageError(what, seen=seen, fix=fix)


def _check_numbers(spec: JobSpec) -> None:
    grace_s, restarts, most = spec.grace_s, spec.max_restarts, spec.nnodes[1] * spec.nproc
    _require(spec.nproc >= 1, "the number of processes must be at least 1", f"--nproc {spec.nproc}")
    _require(grace_s is None or grace_s >= 0, "the grace time cannot be negative", f"{grace_s} s")
    hang_s = spec.hang_timeout_s
    _require(hang_s is None or hang_s > 0, "the limit of a hang must be above zero", f"{hang_s} s")
    _require(
        restarts >= 0, "the number of restarts cannot be negative", f"--max-restarts {restarts}"
    )
    _require(
        not spec.elastic or 1 <= spec.min_ranks <= most,
        f"--min-ranks must be from 1 to {most}, got {spec.min_ranks}",
        "",
    )


def _check_hosts(spec: JobSpec) -> None:
    least, most = spec.nnodes
    given = f"--nnodes {least}" if least == most else f"--nnodes {least}:{most}"
    _require(
        spec.rdzv_backend != "etcd" or (spec.endpoint and spec.run_id),
        "a job in etcd needs etcd's addresses and a name of its own",
        "",
        "Give --rdzv-endpoint HOST:2379[,HOST:2379] and --rdzv-id.",
    )
    _require(
        1 <= least <= most,
        f"--nnodes MIN:MAX needs 1 <= MIN <= MAX, got {given.removeprefix('--nnodes ')}",
        "",
    )
    _require(
        most == 1 or spec.endpoint is not None,
        f"{given} needs --rdzv-endpoint",
        "",
        "Give every host the same --rdzv-endpoint HOST:PORT of one of them.",
    )
    for name in ("cacert", "cert", "key", "password_file"):
        file = spec.rdzv_conf.get(name)
        _require(file is None or os.access(file, os.R_OK), f"{name}= cannot be read", f"{file}")
    if spec.endpoint is not None:
        host, colon, port = spec.endpoint.rpartition(":")
        good = host and colon and port.isdecimal() and 0 < int(port) < 1 << 16
        _require(good, "the endpoint must be HOST:PORT", spec.endpoint, "For example node1:29400.")
    _require(
        spec.node_rank is None or 0 <= spec.node_rank < most,
        f"the number of this host must be from 0 to {most - 1}",
        f"--node-rank {spec.node_rank}",
    )
    _require(
        spec.master_port is None or 0 < spec.master_port < 1 << 16,
        "not a port",
        f"--master-port {spec.master_port}",
    )
    _require(
        spec.join_timeout_s > 0 and spec.last_call_s >= 0,
        "the times to wait for hosts must be positive",
        f"join_timeout={spec.join_timeout_s:g}, last_call_timeout={spec.last_call_s:g}",
    )


def check_output(spec: JobSpec) -> None:
    """Raise `UsageError` if output is to go where it cannot, or of ranks that are not started."""
    named = {
        "--local-ranks-filter": spec.local_ranks_filter or frozenset[int](),
        "--redirects": frozenset(spec.redirects if isinstance(spec.redirects, Mapping) else ()),
        "--tee": frozenset(spec.tee if isinstance(spec.tee, Mapping) else ()),
    }
    for flag, ranks in named.items():
        unknown = sorted(rank for rank in ranks if not 0 <= rank < spec.nproc)
        _require(
            not unknown,
            f"this host has the local ranks 0 to {spec.nproc - 1}",
            f"{flag} names {', '.join(map(str, unknown))}",
        )
    for directory in filter(None, (spec.log_dir, spec.trace_dir)):
        _require(directory.is_dir() or not directory.exists(), "not a directory", f"{directory}")
    log = spec.event_log
    _require(log is None or log.parent.is_dir(), "no directory for --event-log", f"{log}")


def _check_script(path: str) -> None:
    if os.path.isdir(path):
        main = os.path.join(path, "__main__.py")
        _require(os.path.isfile(main), "not a file", f"{path} is a directory without __main__.py")
        return
    begin = b""
    try:
        os.stat(path)
        if os.path.isfile(path):  # a pipe may be read only once
            with open(path, "rb") as file:
                begin = file.read(len(_ELF))
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError("no such file", seen=path, fix="For a module, use -m.") from None
    except OSError as error:
        raise UsageError("the file cannot be read", seen=f"{path}: {error.strerror}") from None
    _require(begin != _ELF, "not a Python file", f"{path} is a program", "Use --no-python.")


def _check_module(name: str) -> None:
    """Look the module's top package up without importing it; ranks say what is wrong below."""
    sys.path.insert(0, os.getcwd())  # where `python -m` looks first
    try:
        found = importlib.util.find_spec(name.partition(".")[0])
    except (ValueError, ImportError):
        found = None
    finally:
        del sys.path[0]
    _require(found is not None, "no such module", name, "For a file, leave out -m.")


def _check_executable(program: str) -> None:
    if shutil.which(program) is not None:
        return
    _require(
        not os.path.isfile(program),
        "the program is not executable",
        program,
        "For a Python file leave out --no-python; otherwise `chmod +x` it.",
    )
    raise UsageError("no such program", seen=program, fix="Check its name and mode.")

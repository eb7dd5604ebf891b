"""What the user asked to run: checked once, before anything is started.

A mistake here is one clear line and nothing has to be ended.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import stat
import sys
from collections.abc import Mapping

from dure.errors import UsageError
from dure.launch.ranks.child import first_path
from dure.launch.ranks.cores import may_have_gpus
from dure.launch.spec import JobSpec

__all__ = ["check_output", "check_program"]


def check_program(spec: JobSpec) -> None:
    """Raise `UsageError` if the job cannot be started as it was asked for."""
    _check_numbers(spec)
    _check_hosts(spec)
    check_output(spec)
    if spec.kind == "script":
        _check_script(spec.program)
    elif spec.kind == "module":
        found = _can_import(spec.program, first_path("module", spec.program))
        _require(found, "no such module", spec.program, "For a file, leave out -m.")
    else:
        found = shutil.which(spec.program) is not None
        _require(found, "no such program, or it is not executable", spec.program)
    for name in spec.preload if spec.kind != "executable" else ():
        found = _can_import(name, first_path(spec.kind, spec.program))
        _require(found, "no such module", f"--preload {name}")


def _require(holds: object, what: str, seen: str = "", fix: str = "") -> None:
    if not holds:
        raise UsageError(what, seen=seen, fix=fix)


def _check_numbers(spec: JobSpec) -> None:
    _require(spec.nproc >= 1, "--nproc must be at least 1", f"{spec.nproc}")
    for what, seconds, least in (
        ("the grace time", spec.grace_s, 0.0),
        ("--hang-timeout", spec.hang_timeout_s, 1e-9),
        ("the time to wait for hosts", spec.join_timeout_s, 1e-9),
        ("the time to wait for more hosts", spec.last_call_s, 0.0),
        ("the number of restarts", spec.max_restarts, 0),
    ):
        good = seconds is None or seconds >= least
        _require(good, f"{what} must be {'positive' if least else 'at least 0'}", f"{seconds}")
    _require(
        spec.numa in (None, "node") or may_have_gpus(),
        "these bindings need a GPU for each rank, and this host has none",
        f"--numa-binding {spec.numa}",
        "--numa-binding node works without GPUs.",
    )
    most = spec.nnodes[1] * spec.nproc
    good = not spec.elastic or 1 <= spec.min_ranks <= most
    _require(good, f"--min-ranks must be from 1 to {most}", f"{spec.min_ranks}")


def _check_hosts(spec: JobSpec) -> None:
    least, most = spec.nnodes
    _require(
        spec.rdzv_backend != "etcd" or (spec.endpoint and spec.run_id),
        "a job in etcd needs etcd's addresses and a name of its own",
        fix="Give --rdzv-endpoint HOST:2379[,HOST:2379] and --rdzv-id.",
    )
    _require(1 <= least <= most, "--nnodes MIN:MAX needs 1 <= MIN <= MAX", f"{least}:{most}")
    _require(
        most == 1 or spec.endpoint is not None,
        f"--nnodes {most} needs --rdzv-endpoint",
        fix="Give every host the same --rdzv-endpoint HOST:PORT of one of them.",
    )
    for name in ("cacert", "cert", "key", "password_file"):
        file = spec.rdzv_conf.get(name)
        _require(file is None or os.access(file, os.R_OK), f"{name}= cannot be read", f"{file}")
    if spec.endpoint is not None:
        host, _, port = spec.endpoint.rpartition(":")
        good = host and port.isdecimal() and 0 < int(port) < 1 << 16
        _require(good, "the endpoint must be HOST:PORT", spec.endpoint, "For example node1:29400.")
    good = spec.node_rank is None or 0 <= spec.node_rank < most
    _require(good, f"the number of this host must be from 0 to {most - 1}", f"{spec.node_rank}")
    good = spec.master_port is None or 0 < spec.master_port < 1 << 16
    _require(good, "not a port", f"--master-port {spec.master_port}")


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
    for flag, directory in (("--log-dir", spec.log_dir), ("--trace-dir", spec.trace_dir)):
        good = directory is None or os.path.isdir(directory) or not os.path.exists(directory)
        _require(good, f"{flag} must be a directory", f"{directory} is a file")
    if spec.log_dir is not None and os.path.isdir(spec.log_dir):
        public = os.stat(spec.log_dir).st_mode & stat.S_IWOTH  # others could put links in it
        what, fix = "every user may write to the log directory", "Name a directory in it."
        _require(not public, what, f"{spec.log_dir}", fix)
    log = spec.event_log
    _require(log is None or log.parent.is_dir(), "no directory for --event-log", f"{log}")


def _check_script(path: str) -> None:
    main = os.path.join(path, "__main__.py") if os.path.isdir(path) else path
    _require(os.path.exists(main), "no such file", main, "For a module, use -m.")
    _require(os.access(main, os.R_OK), "the file cannot be read", main)


def _can_import(name: str, directory: str) -> bool:
    """Look the module's top package up without importing it; ranks say what is wrong below."""
    sys.path.insert(0, directory)  # where Python looks first
    try:
        return importlib.util.find_spec(name.partition(".")[0]) is not None
    except (ValueError, ImportError):
        return False
    finally:
        del sys.path[0]

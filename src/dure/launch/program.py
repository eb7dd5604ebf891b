"""What the user asked to run: checked once, before anything is started.

A mistake here is one clear line and nothing has to be ended.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec, PathFinder

from dure.errors import UsageError
from dure.launch.spec import JobSpec

__all__ = ["check_program"]

_ELF = b"\x7fELF"


def check_program(spec: JobSpec) -> None:
    """Raise `UsageError` if the job cannot be started as it was asked for."""
    _check_directory()
    _check_numbers(spec)
    _check_hosts(spec)
    _check_output(spec)
    if spec.kind == "script":
        _check_script(spec.program)
    elif spec.kind == "module":
        _check_module(spec.program)
    elif shutil.which(spec.program) is None:
        if os.path.isfile(spec.program):
            raise UsageError(
                "the program is not executable",
                seen=spec.program,
                fix="For a Python file leave out --no-python; otherwise `chmod +x` it.",
            )
        raise UsageError("no such program", seen=spec.program, fix="Check its name and mode.")


def _check_directory() -> None:
    try:
        os.getcwd()
    except OSError as error:
        raise UsageError(
            "the working directory is gone or cannot be read",
            seen=str(error.strerror),
            fix="Change to one that is there: `cd`.",
        ) from error


def _check_numbers(spec: JobSpec) -> None:
    if spec.nproc < 1:
        raise UsageError("the number of processes must be at least 1", seen=f"--nproc {spec.nproc}")
    if spec.grace_s is not None and spec.grace_s < 0:
        raise UsageError("the grace time cannot be negative", seen=f"{spec.grace_s} s")
    if spec.max_restarts < 0:
        raise UsageError(
            "the number of restarts cannot be negative", seen=f"--max-restarts {spec.max_restarts}"
        )
    most = spec.nnodes[1] * spec.nproc
    if spec.elastic and not 1 <= spec.min_ranks <= most:
        raise UsageError(
            f"an elastic job must do with at least 1 and at most its {most} ranks",
            seen=f"--min-ranks {spec.min_ranks}",
        )


def _check_hosts(spec: JobSpec) -> None:
    least, most = spec.nnodes
    if spec.rdzv_backend == "etcd" and not (spec.endpoint and spec.run_id):
        raise UsageError(
            "a job in etcd needs etcd's addresses and a name of its own",
            fix="Give --rdzv-endpoint HOST:2379[,HOST:2379] and --rdzv-id.",
        )
    if not 1 <= least <= most:
        raise UsageError(
            "the number of hosts must be at least 1, and the most not below the least",
            seen=f"--nnodes {_nnodes(spec)}",
        )
    if most > 1 and spec.endpoint is None:
        raise UsageError(
            "several hosts need a place to meet",
            seen=f"--nnodes {_nnodes(spec)} and no endpoint",
            fix="Give every host the same --rdzv-endpoint HOST:PORT of one of them.",
        )
    if spec.endpoint is not None and not _is_endpoint(spec.endpoint):
        raise UsageError("the endpoint must be HOST:PORT", seen=spec.endpoint)
    if spec.node_rank is not None and not 0 <= spec.node_rank < most:
        raise UsageError(
            f"the number of this host must be from 0 to {most - 1}",
            seen=f"--node-rank {spec.node_rank}",
        )
    if spec.master_port is not None and not 0 < spec.master_port < 1 << 16:
        raise UsageError("not a port", seen=f"--master-port {spec.master_port}")
    if spec.join_timeout_s <= 0 or spec.last_call_s < 0:
        raise UsageError(
            "the times to wait for hosts must be positive",
            seen=f"join_timeout={spec.join_timeout_s:g}, last_call_timeout={spec.last_call_s:g}",
        )


def _nnodes(spec: JobSpec) -> str:
    """Return the number of hosts as a user writes it."""
    least, most = spec.nnodes
    return str(least) if least == most else f"{least}:{most}"


def _is_endpoint(text: str) -> bool:
    host, colon, port = text.rpartition(":")
    return bool(host and colon) and port.isdecimal() and int(port) < 1 << 16


def _check_output(spec: JobSpec) -> None:
    """Refuse local ranks that this host does not start."""
    named = {
        "--local-ranks-filter": spec.local_ranks_filter or frozenset[int](),
        "--redirects": frozenset(spec.redirects if isinstance(spec.redirects, Mapping) else ()),
        "--tee": frozenset(spec.tee if isinstance(spec.tee, Mapping) else ()),
    }
    for flag, ranks in named.items():
        strangers = sorted(rank for rank in ranks if not 0 <= rank < spec.nproc)
        if strangers:
            raise UsageError(
                f"this host has the local ranks 0 to {spec.nproc - 1}",
                seen=f"{flag} names {', '.join(map(str, strangers))}",
            )


def _check_script(path: str) -> None:
    if os.path.isdir(path):
        if not os.path.isfile(os.path.join(path, "__main__.py")):
            raise UsageError("not a file", seen=f"{path} is a directory without __main__.py")
        return
    if not os.path.exists(path):
        if _is_hidden(path):
            raise UsageError(
                "the file cannot be read",
                seen=f"{path}: its directory is closed to this user",
                fix="See who may enter it (`ls -ld`).",
            )
        raise UsageError("no such file", seen=path, fix="For a module, use -m.")
    if not os.access(path, os.R_OK):
        raise UsageError("the file cannot be read", seen=path)
    if os.path.isfile(path) and _begins_with(path, _ELF):
        raise UsageError(
            "not a Python file", seen=f"{path} is a program", fix="Start it with --no-python."
        )


def _is_hidden(path: str) -> bool:
    """Whether it is not ours to know if there is such a file."""
    try:
        os.stat(path)
    except OSError as error:
        return isinstance(error, PermissionError)
    return False


def _begins_with(path: str, mark: bytes) -> bool:
    with open(path, "rb") as file:
        return file.read(len(mark)) == mark


def _check_module(name: str) -> None:
    """Look the module up without importing its packages, which is the ranks' business.

    A package with an import hook of its own is left to the ranks, who say it as well.
    """
    top, *rest = name.split(".")
    spec = _find_top(top) if top and all(rest) else None
    path = top
    for part in rest:
        if spec is None or not _is_plain(spec):
            break
        path = f"{path}.{part}"
        spec = _find_in(spec, path)
    if spec is None:
        raise UsageError("no such module", seen=path or name, fix="For a file, leave out -m.")
    is_package = spec.submodule_search_locations is not None and _is_plain(spec)
    if is_package and _find_in(spec, f"{name}.__main__") is None:
        raise UsageError("the package cannot be run", seen=f"{name} has no __main__.py")


def _find_in(package: ModuleSpec, name: str) -> ModuleSpec | None:
    return PathFinder.find_spec(name, list(package.submodule_search_locations or ()))


def _find_top(name: str) -> ModuleSpec | None:
    sys.path.insert(0, os.getcwd())  # where `python -m` looks first
    try:
        return importlib.util.find_spec(name)
    except (ValueError, ImportError):
        return None
    finally:
        del sys.path[0]


def _is_plain(spec: ModuleSpec) -> bool:
    """Whether the ordinary path finder found it, so that it finds what is below, too."""
    return PathFinder.find_spec(spec.name, _parent_path(spec)) is not None


def _parent_path(spec: ModuleSpec) -> list[str] | None:
    if spec.submodule_search_locations:
        return [os.path.dirname(location) for location in spec.submodule_search_locations]
    return [os.path.dirname(spec.origin)] if spec.origin else None

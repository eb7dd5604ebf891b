"""From the values of flags to a `JobSpec`.

Flags come before variables `PET_*`, and these before what was found of a cluster. The difficult
part is where several hosts meet. In torchrun's words:

    --rdzv-backend c10d     the endpoint alone; hosts are numbered as they arrive
    --rdzv-backend static   the endpoint, or --master-addr and --master-port; --node-rank numbers
    --rdzv-backend etcd     the etcd servers are the endpoint; hosts are numbered as they arrive

Without a backend, --node-rank or --master-* mean static. With one host only etcd and the
--master-* flags, which set what its ranks find, have an effect.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dure.cli.run.flags import EXCLUDE, NEED, run_parser
from dure.cli.run.parser import Given
from dure.errors import UsageError
from dure.launch import JobSpec
from dure.launch.ranks.cores import may_have_gpus

_STATIC_PORT = 29500
_ENDPOINT_PORT = 29400
_ETCD_PORT = 2379
_ETCD_KEYS = ("cacert", "cert", "key", "user", "password_file")
_LEAST_LEASE_S = 2.0
_COUNT_LIMIT_S = 120
_IN_TORCH = {"gpu": "cuda", "xpu": "xpu", "auto": "accelerator"}
# These need several flags; every other value that is named like a field becomes that field.
_OF_RENDEZVOUS = frozenset(
    {"nnodes", "node_rank", "endpoint", "master_addr", "master_port", "run_id", "local_addr"}
)
_PLAIN = frozenset(field.name for field in fields(JobSpec)) - _OF_RENDEZVOUS - {"nproc", "log_dir"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """The job on this host, and the values of flags that say where and how it is started.

    `flags` are those that were written, to pass on to other hosts: names, and words. `set_by_user`
    are the names of the values that the user chose, by flags or variables.
    """

    spec: JobSpec
    hosts: str | None = None
    hostfile: Path | None = None
    dry_run: bool = False
    key_file: Path | None = None
    key_stdin: bool = False
    flags: tuple[tuple[str, tuple[str, ...]], ...] = ()
    exports: Sequence[str] = ()
    remote_python: str | None = None
    ssh_options: Sequence[str] = ()
    leash: bool = False
    page: bool = False
    metrics_port: int | None = None
    set_by_user: frozenset[str] = frozenset()


_OF_REQUEST = frozenset(field.name for field in fields(RunRequest)) - {"flags"}


def make_request(
    given: Given,
    variables: Mapping[str, object] | None = None,
    found: Mapping[str, object] | None = None,
) -> RunRequest:
    """Make a request of the command line, the variables, and what was found of a cluster.

    The mappings are by the flags' names.

    Raises:
        UsageError: Flags contradict each other, or the program is missing.
    """
    chosen = {**(variables or {}), **given.values}
    values: dict[str, Any] = {**(found or {}), **chosen}
    if not given.program:
        raise UsageError("no program was given", fix="Write `dure run --nproc 2 train.py`.")
    _check_combinations(chosen, given.values)
    module, executable = (bool(values.get(name)) for name in ("module", "no_python"))
    script = bool(values.get("run_path")) or not (module or executable)
    if module and executable and not script:
        raise UsageError("-m and --no-python exclude each other")
    nproc, directory = values.get("nproc", 1), values.get("log_dir")
    if directory is not None and values.get("run_id") and not values.get("standalone"):
        directory = directory / str(values["run_id"])
    spec = JobSpec(
        program=given.program,
        args=given.args,
        kind="script" if script else "module" if module else "executable",
        nproc=nproc if isinstance(nproc, int) else _count(nproc),
        log_dir=directory,
        **_rendezvous(values),
        **{name: value for name, value in values.items() if name in _PLAIN},
    )
    ours = {name: value for name, value in values.items() if name in _OF_REQUEST}
    return RunRequest(spec=spec, flags=given.flags, set_by_user=frozenset(chosen), **ours)


def _check_combinations(chosen: Mapping[str, object], given: Mapping[str, object]) -> None:
    """Refuse flags that have no effect, or exclude each other.

    Args:
        chosen: The values that the user chose, by flags or variables.
        given: Those of the command line alone.
    """
    name = run_parser().spelling
    for flag, others in NEED.items():
        if flag in given and not chosen.keys() & set(others):
            needed = " or ".join(map(name, others))
            raise UsageError(f"{name(flag)} has no effect without {needed}")
    for flag, others in EXCLUDE.items():
        for other in others:
            if flag in chosen and other in chosen:
                raise UsageError(f"{name(flag)} and {name(other)} exclude each other")


def _rendezvous(values: Mapping[str, Any]) -> dict[str, Any]:
    least, most = values.get("nnodes", (1, 1))
    if values.get("standalone") and (least, most) != (1, 1):
        raise UsageError("--standalone is for one host", seen=f"--nnodes {least}:{most}")
    conf: Mapping[str, Any] = values.get("config", {})
    out: dict[str, Any] = {"nnodes": (least, most), "local_addr": values.get("local_addr")}
    for key, field in (
        ("timeout", "join_timeout_s"),
        ("join_timeout", "join_timeout_s"),
        ("last_call_timeout", "last_call_s"),
    ):
        out |= {field: conf[key]} if key in conf else {}
    out["lease_s"] = _lease(conf)
    if values.get("standalone"):
        return out
    out["run_id"] = values.get("run_id")
    credentials = {key: conf[key] for key in _ETCD_KEYS if key in conf}
    if values.get("backend") == "etcd":
        addresses = str(values.get("endpoint", "")).split(",")  # check_program misses them
        endpoint = ",".join(_with_port(each, _ETCD_PORT) for each in addresses if each)
        return out | {
            "rdzv_backend": "etcd",
            "rdzv_conf": credentials,
            "endpoint": endpoint or None,
        }
    if credentials:
        raise UsageError(
            f"{', '.join(credentials)} in --rdzv-conf is for etcd", fix="Add --rdzv-backend etcd."
        )
    if most > 1:
        return out | _several(values, conf)
    return out | {name: values.get(name) for name in ("master_addr", "master_port")}


def _lease(conf: Mapping[str, Any]) -> float | None:
    """Return how long a launcher may be silent, if the user has set that; with torch's defaults."""
    lease_s: float | None = conf.get("lease")
    if lease_s is None and {"keep_alive_interval", "keep_alive_max_attempt"} & conf.keys():
        attempts = conf.get("keep_alive_max_attempt", 3.0)
        lease_s = float(conf.get("keep_alive_interval", 5.0) * attempts)
    if lease_s is not None and lease_s < _LEAST_LEASE_S:
        raise UsageError(
            "the lease of a launcher is too short",
            seen=f"{lease_s:g} s; a busy host or network may be silent that long",
            fix=f"Set lease={_LEAST_LEASE_S:g} or more in --rdzv-conf.",
        )
    return lease_s


def _several(values: Mapping[str, Any], conf: Mapping[str, Any]) -> dict[str, Any]:
    # Without --rdzv-backend torchrun means static; here only if something says so.
    named = {"node_rank", "master_addr", "master_port"} & set(values)
    static = values.get("backend", "static" if named else "c10d") == "static"
    least, most = values["nnodes"]
    if static and least != most:
        raise UsageError(
            "--rdzv-backend static is for a fixed number of hosts",
            seen=f"--nnodes {least}:{most}",
            fix="Use --rdzv-backend c10d and --rdzv-endpoint, which number hosts as they come.",
        )
    out: dict[str, Any] = {"serves": conf.get("is_host")}
    if static:
        out["node_rank"] = values.get("node_rank", 0)
    if values.get("endpoint"):
        out["endpoint"] = _with_port(str(values["endpoint"]), _ENDPOINT_PORT)
    elif static:
        host = str(values.get("master_addr", "127.0.0.1")).strip("[]")
        out["endpoint"] = address(host, values.get("master_port", _STATIC_PORT))
    return out


def _with_port(text: str, port: int) -> str:
    """Return HOST:PORT of `text`, which may leave out the port."""
    text = text.strip()
    return f"{text}:{port}" if text.endswith("]") or ":" not in text else text


def address(host: str, port: int) -> str:
    """Return HOST:PORT, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _count(kind: str) -> int:
    """Return how many ranks `auto`, `cpu`, `gpu` or `xpu` means on this host.

    Only torch knows how many GPUs a program will see. The launcher does not load torch, so it asks
    another interpreter (some seconds), and only if this host has something that could be a GPU.

    Raises:
        UsageError: There is no such device.
    """
    cores = len(os.sched_getaffinity(0))
    if kind == "cpu":
        return cores
    found = _ask_torch(_IN_TORCH[kind]) if may_have_gpus() else 0
    if not found and kind != "auto":
        raise UsageError(
            f"this host has no {kind} that torch can use",
            seen=f"--nproc {kind}",
            fix="See `python -m torch.utils.collect_env`, or give a number.",
        )
    return found or cores


def _ask_torch(module: str) -> int:
    code = f"import torch; print('devices:', torch.{module}.device_count())"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code],  # -P: not the modules of the working directory
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_COUNT_LIMIT_S,
            check=True,
        )
    except subprocess.SubprocessError as error:
        raise UsageError(
            "the devices could not be counted with torch",
            seen=str(getattr(error, "stderr", "") or error).strip().splitlines()[-1],
            fix="Give a number: --nproc N.",
        ) from None
    return int(done.stdout.rpartition("devices:")[2])

"""What the user said, made sense of: from values by name to a `JobSpec`.

Flags come before variables `PET_*`, and these before what was found of a cluster. The one knot is
where several hosts meet. In torchrun's words:

    --rdzv-backend c10d     the endpoint alone; hosts are numbered as they come
    --rdzv-backend static   the endpoint, or --master-addr and --master-port; --node-rank numbers

and without a backend, --node-rank or --master-* mean static. A single host meets nobody, so none
of these matters to it, except that --master-addr and --master-port are what its ranks find.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dure.cli.run.devices import count
from dure.cli.run.parse import Given
from dure.cli.run.values import endpoint
from dure.errors import UsageError
from dure.launch import JobSpec, Std
from dure.launch.spec import Kind

__all__ = ["Request", "make_request"]

_STATIC_PORT = 29500
_ENDPOINT_PORT = 29400


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to do.

    Args:
        spec: The job on this host.
        hosts: Hosts to start it on over ssh, as the user wrote them.
        hostfile: The same, in a file.
        dry_run: Only show how it would be started.
        key_file: Where the job's key is.
        key_stdin: The key comes first on the standard input.
        flags: The flags as they were written, to give to other hosts: names, and words.
        exports: Variables to hand to the ranks on other hosts: NAME, or NAME=VALUE.
        remote_python: The interpreter on other hosts.
        ssh_options: Words for ssh.
        leash: The standard input is held by the front that started this process.
        set_by_user: The names of the values that the user, and nobody else, chose.
    """

    spec: JobSpec
    hosts: str | None = None
    hostfile: Path | None = None
    dry_run: bool = False
    key_file: Path | None = None
    key_stdin: bool = False
    flags: tuple[tuple[str, tuple[str, ...]], ...] = ()
    exports: tuple[str, ...] = ()
    remote_python: str | None = None
    ssh_options: tuple[str, ...] = ()
    leash: bool = False
    set_by_user: frozenset[str] = frozenset()


def make_request(
    given: Given,
    variables: Mapping[str, object] | None = None,
    found: Mapping[str, object] | None = None,
) -> Request:
    """Return what to do.

    Args:
        given: The command line.
        variables: The values of `PET_*`.
        found: Values, by the flags' names, of the cluster around this process.

    Raises:
        UsageError: Flags contradict each other, or the program is missing.
    """
    chosen = {**(variables or {}), **given.values}
    values: dict[str, Any] = {**(found or {}), **chosen}
    if not given.program:
        raise UsageError("there is no program to start", fix="Write `dure run --nproc 2 train.py`.")
    if "min_ranks" in chosen and not values.get("elastic"):
        raise UsageError(
            "--min-ranks is for elastic jobs",
            seen=f"--min-ranks {chosen['min_ranks']} without --elastic",
            fix="Add --elastic if the program outlives deaths (dure.elastic), or leave it out.",
        )
    spec = JobSpec(
        program=given.program,
        args=given.args,
        kind=_kind(values),
        nproc=_nproc(values),
        **_meeting(values),
        **_renamed(values),
        **_output(values),
    )
    return Request(
        spec=spec,
        hosts=values.get("hosts"),
        hostfile=values.get("hostfile"),
        dry_run=bool(values.get("dry_run")),
        key_file=values.get("key_file"),
        key_stdin=bool(values.get("key_stdin")),
        flags=given.flags,
        exports=values.get("exports", ()),
        remote_python=values.get("remote_python"),
        ssh_options=values.get("ssh_options", ()),
        leash=bool(values.get("leash")),
        set_by_user=frozenset(chosen),
    )


def _kind(values: Mapping[str, Any]) -> Kind:
    if values.get("run_path"):
        return "script"
    if values.get("module") and values.get("no_python"):
        raise UsageError("-m and --no-python exclude each other")
    return (
        "module" if values.get("module") else "executable" if values.get("no_python") else "script"
    )


def _nproc(values: Mapping[str, Any]) -> int:
    nproc = values.get("nproc", 1)
    return nproc if isinstance(nproc, int) else count(nproc)


_SAME = {
    "role": "role",
    "max_restarts": "max_restarts",
    "elastic": "elastic",
    "min_ranks": "min_ranks",
    "keep_going": "keep_going",
    "grace": "grace_s",
    "signals": "signals",
    "prefix": "prefix",
    "live": "live",
    "trace_dir": "trace_dir",
    "malloc_defaults": "malloc_defaults",
    "numa": "numa",
    "virtual_local_rank": "virtual_local_rank",
    "preload": "preload",
    "filter": "local_ranks_filter",
    "stdout_filters": "stdout_filters",
    "stderr_filters": "stderr_filters",
    "local_addr": "local_addr",
}
"""Values that become a field as they are, under the field's name."""


def _renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    fields = {_SAME[name]: value for name, value in values.items() if name in _SAME}
    if values.get("no_fold"):
        fields["fold"] = False
    if values.get("no_zygote"):
        fields["zygote"] = "never"
    return fields


def _output(values: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "redirects": values.get("redirects", Std.NONE),
        "tee": values.get("tee", Std.NONE),
    }
    directory: Path | None = values.get("log_dir")
    if directory is not None and values.get("run_id") and not values.get("standalone"):
        directory = directory / str(values["run_id"])
    fields["log_dir"] = directory
    return fields


def _meeting(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return how many hosts there are, and how they meet."""
    least, most = values.get("nnodes", (1, 1))
    if values.get("standalone") and (least, most) != (1, 1):
        raise UsageError("--standalone is for one host", seen=f"--nnodes {least}:{most}")
    conf: Mapping[str, Any] = values.get("config", {})
    fields: dict[str, Any] = {"nnodes": (least, most)}
    for key, name in (("timeout", "join_timeout_s"), ("join_timeout", "join_timeout_s")):
        if key in conf:
            fields[name] = conf[key]
    if "last_call_timeout" in conf:
        fields["last_call_s"] = conf["last_call_timeout"]
    if "quorum" in conf:
        fields["quorum"] = conf["quorum"]
    if values.get("standalone"):
        return fields
    fields["run_id"] = values.get("run_id")
    if most > 1:
        return fields | _several(values, conf)
    return fields | {
        "master_addr": values.get("master_addr"),
        "master_port": values.get("master_port"),
    }


def _several(values: Mapping[str, Any], conf: Mapping[str, Any]) -> dict[str, Any]:
    static = values.get("backend", _implied_backend(values)) == "static"
    least, most = values["nnodes"]
    if static and least != most:
        raise UsageError(
            "--rdzv-backend static is for a fixed number of hosts",
            seen=f"--nnodes {least}:{most}",
            fix="Use --rdzv-backend c10d and --rdzv-endpoint, which number hosts as they come.",
        )
    fields: dict[str, Any] = {"serves": conf.get("is_host")}
    if static:
        fields["node_rank"] = values.get("node_rank", 0)
    if values.get("endpoint"):
        fields["endpoint"] = _endpoint(str(values["endpoint"]), "--rdzv-endpoint")
    elif static:
        host = str(values.get("master_addr", "127.0.0.1"))
        bare = f"[{host}]" if ":" in host and not host.startswith("[") else host
        fields["endpoint"] = _endpoint(
            f"{bare}:{values.get('master_port', _STATIC_PORT)}", "--master-addr"
        )
    return fields


def _implied_backend(values: Mapping[str, Any]) -> str:
    """Without --rdzv-backend torchrun means static; here only if something says so."""
    named = {"node_rank", "master_addr", "master_port"} & set(values)
    return "static" if named else "c10d"


def _endpoint(text: str, flag: str) -> str:
    try:
        return endpoint(text, _ENDPOINT_PORT)
    except ValueError as error:
        raise UsageError(f"{flag} must be {error}", seen=repr(text)) from None

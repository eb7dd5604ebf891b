"""`dure run --hosts` and `--dry-run`: a job on several hosts, started over ssh."""

from __future__ import annotations

import os
import re
import sys
import uuid

from dure import env
from dure.cli.run.request import RunRequest, address
from dure.errors import UsageError
from dure.launch.clusters.commands import HostsJob, shown_command
from dure.launch.clusters.hosts import Slots, read_hostfile, read_hosts
from dure.launch.clusters.meeting import meeting_host
from dure.launch.clusters.ssh_launcher import run_on_hosts
from dure.launch.interpreter import interpreter_options
from dure.placement import derived_port
from dure.store.key import mint

_OF_THE_SSH_LAUNCHER = frozenset(
    {"hosts", "hostfile", "dry_run", "exports", "remote_python", "ssh_options", "leash"}
    | {"nnodes", "endpoint", "backend", "run_id", "node_rank", "master_addr", "master_port"}
    | {"key_file", "key_stdin", "standalone", "local_addr"}
)
"""Flags that the ssh launcher uses itself, or sets on each host."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def start_elsewhere(request: RunRequest) -> int:
    """Start the job on its hosts, or only show how; return the exit code.

    Raises:
        UsageError: The hosts are not named, or they or the variables for them cannot be read.
    """
    if request.hosts is None and request.hostfile is None and request.spec.nnodes != (1, 1):
        raise UsageError("--dry-run of a job on several hosts needs --hosts or --hostfile")
    job = _hosts_job(request)
    if not request.dry_run:
        return run_on_hosts(job, request.spec.key or mint().raw)
    if len(job.hosts) > 1:
        print("# all at the same time; started by hand they need the same key file on all hosts")
    for number in range(len(job.hosts)):
        print(shown_command(job, number))
    return 0


def _hosts_job(request: RunRequest) -> HostsJob:
    spec = request.spec
    hosts = _hosts(request)
    run_id = spec.run_id or f"dure-{uuid.uuid4().hex[:12]}"
    dropped = set(_OF_THE_SSH_LAUNCHER)
    if all(slots.nproc is not None for slots in hosts):  # each has its own number
        dropped.add("nproc")
    flags = [word for name, words in request.flags if name not in dropped for word in words]
    if "prefix" not in request.set_by_user:
        flags += ["--prefix", "host"]
    return HostsJob(
        hosts=hosts,
        program=(spec.program, *spec.args),
        flags=tuple(flags),
        run_id=run_id,
        endpoint=spec.endpoint or _endpoint(request, hosts, run_id),
        directory=os.getcwd(),
        python=request.remote_python or sys.executable,
        options=interpreter_options(),
        exports=_exports(request),
        ssh_options=tuple(request.ssh_options),
        backend="etcd" if spec.rdzv_backend == "etcd" else "static",
        grace_s=spec.grace_s,
    )


def _hosts(request: RunRequest) -> tuple[Slots, ...]:
    if request.hosts is not None:
        return read_hosts(request.hosts)
    if request.hostfile is not None:
        return read_hostfile(request.hostfile)
    return (Slots(host="localhost"),)


def _endpoint(request: RunRequest, hosts: tuple[Slots, ...], run_id: str) -> str:
    host = meeting_host([slots.host for slots in hosts], tuple(request.ssh_options))
    port = request.spec.master_port or derived_port(run_id)
    return address(host, port)


def _exports(request: RunRequest) -> dict[str, str]:
    """Return the variables of -x; a name alone means this process's value."""
    environ = env.everything()
    exports: dict[str, str] = {}
    for text in request.exports:
        name, equals, value = text.partition("=")
        if not _NAME.fullmatch(name):
            raise UsageError("-x needs NAME or NAME=VALUE", seen=repr(text))
        if not equals and name not in environ:
            raise UsageError("-x names a variable that is not set here", seen=name)
        exports[name] = value if equals else environ[name]
    return exports

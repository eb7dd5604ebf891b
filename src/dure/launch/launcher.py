"""The launcher's part of a job: its key, reaper, terminal and probes, its rounds, and its result.

All of a job is in pipes, anonymous memory and the launcher's own store, so nothing remains on
disk, even if the launcher is killed. The loop itself is in `dure.launch.round`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dure import env
from dure.errors import LaunchError
from dure.launch.local import LocalJob
from dure.launch.ranks.cores import threads_for
from dure.launch.ranks.environment import JobAddress
from dure.launch.ranks.errorfiles import temporary_folder
from dure.launch.ranks.processes import adopting_orphans
from dure.launch.ranks.reaper import Reaper
from dure.launch.ranks.zygote import Zygote
from dure.launch.round import Workplace
from dure.launch.show.summary import summary
from dure.launch.show.terminal import Terminal, terminal_variables
from dure.launch.signals import Interrupted, first_of
from dure.launch.spec import JobResult, JobSpec, signal_name
from dure.store.key import SHARED_HOME_S, JobKey, load_for
from dure.store.system import memory_file

if TYPE_CHECKING:
    from dure.launch.agent.agent import Agent
    from dure.launch.agent.link import Link
    from dure.launch.health import HealthServer

__all__ = ["launch"]

_LAST_WORDS_S = 0.3  # how long an interrupted job waits for who reads its output
_TERMINATION_LOG = Path("/dev/termination-log")  # which Kubernetes makes in each container
_KEY_FD = 64
"""The lowest number for the key: imports of a zygote may have opened those below."""


def launch(
    spec: JobSpec,
    name: str,
    notes: list[str],
    zygote: Zygote | None,
    signals: int,
    started: float,
) -> JobResult:
    """Run a job to its end.

    Args:
        spec: The job.
        name: Its name in the environment of its processes.
        notes: Lines to show first.
        zygote: The process that ranks are forked from, if it is of use.
        signals: The pipe in which signals to this process arrive.
        started: When the job began.
    """
    spec = replace(spec, env={**terminal_variables(spec), **spec.env})
    with contextlib.ExitStack() as held:
        enter = held.enter_context
        key_fd = enter(_secret_memory("dure-job-key"))
        password_fd = enter(_password_memory(spec))
        reaper = enter(contextlib.closing(Reaper(name, zygote.pid if zygote else None)))
        if spec.log_dir is None:
            enter(temporary_folder(name))  # for error files; the reaper removes it if we cannot
        enter(adopting_orphans())
        terminal = enter(contextlib.closing(Terminal(spec)))
        health = enter(_health_server(spec))
        link = None
        if spec.endpoint is not None:
            try:
                link = enter(contextlib.closing(_link(spec, signals, terminal.say, reaper)))
            except Interrupted as error:
                terminal.say(f"{signal_name(error.number)}: no rank was started")
                return JobResult(
                    exit_code=128 + error.number,
                    ranks=(),
                    elapsed_s=time.monotonic() - started,
                    interrupted_by=error.number,
                )
        for note in notes:
            terminal.say(note)
        place = Workplace(
            spec=spec,
            address=JobAddress(
                name=name,
                key_fd=key_fd,
                key_file=f"/proc/{os.getpid()}/fd/{key_fd}",
                password_fd=password_fd,
            ),
            host=env.text("DURE_HOST_ID") or socket.gethostname(),
            terminal=terminal,
            signals=signals,
            zygote=zygote if zygote and zygote.is_ready(signals, terminal.say) else None,
            reaper=reaper,
            health=health,
        )
        if link is None:
            return _run(LocalJob(place), place, started)
        from dure.launch.agent.agent import Agent  # lazy: most jobs have one host

        return _run(Agent(place, link), place, started)


def _run(job: LocalJob | Agent, place: Workplace, started: float) -> JobResult:
    """Run the job to its end, and show its result."""
    _say_threads(place)
    outcome = job.work()
    result = JobResult(
        exit_code=outcome.code,
        ranks=outcome.ranks or job.ranks,
        elapsed_s=time.monotonic() - started,
        first_failure=outcome.failure,
        interrupted_by=job.interrupted_by,
        outlived=tuple(job.outlived.items()),
    )
    terminal = place.terminal
    if result.interrupted_by == signal.SIGPIPE and not terminal.unread:
        result = replace(result, exit_code=1)  # its output cannot be written: a full disk
    if outcome.why and result.interrupted_by is None:
        terminal.say(outcome.why)
    lines = summary(result, terminal.has_shown)
    for line in lines if job.node == 0 else lines[:1]:  # only node 0 prints the complete summary
        terminal.say(line)
    if outcome.limit:
        terminal.say(f"the job has failed ({outcome.limit})")
    if not result.ok:
        _write_termination_log(lines)
    terminal.conclude(result)
    terminal.finish()
    _drain(place, in_haste=result.interrupted_by is not None)
    return result


def _write_termination_log(lines: list[str]) -> None:
    """Let Kubernetes show why the container ended (`kubectl describe pod`)."""
    if lines and _TERMINATION_LOG.exists():
        with contextlib.suppress(OSError):
            _TERMINATION_LOG.write_text(lines[0] + "\n")


def _drain(place: Workplace, *, in_haste: bool) -> None:
    """Wait until the last output is taken; after an interruption, not for long."""
    terminal = place.terminal
    deadline = time.monotonic() + _LAST_WORDS_S
    while any(sink.waiting for sink in terminal.sinks):
        if in_haste and time.monotonic() > deadline:
            break
        for sink in terminal.sinks:
            sink.drain(0.05)
        if first_of(place.spec.signals, place.signals) is not None:
            break


@contextlib.contextmanager
def _health_server(spec: JobSpec) -> Iterator[HealthServer | None]:
    """Answer probes, if the user or torch's variable names a port."""
    port = spec.health_port or env.integer("TORCHELASTIC_HEALTH_CHECK_PORT")
    if port is None:
        yield None
        return
    from dure.launch.health import HealthServer  # lazy: few jobs use it, it imports much

    try:
        server = HealthServer(port)
    except (OSError, OverflowError) as error:
        raise LaunchError(
            f"port {port} cannot be used for probes",
            seen=str(error),
            fix="Name another one with --health-port, or TORCHELASTIC_HEALTH_CHECK_PORT.",
        ) from error
    with contextlib.closing(server) as health:
        yield health


def _link(spec: JobSpec, signals: int, say: Callable[[str], None], reaper: Reaper) -> Link:
    """Connect this host to the job's others."""
    from dure.launch.agent.link import HostEndpoint, Link  # lazy: most jobs have one host

    assert spec.endpoint is not None
    if spec.rdzv_backend == "etcd":
        from dure.launch.agent.etcd import EtcdJobEndpoint  # lazy: few jobs use it, it brings ssl

        endpoint: HostEndpoint | EtcdJobEndpoint = EtcdJobEndpoint(spec, signals)
    else:
        host = spec.endpoint.rpartition(":")[0].strip("[]")
        key = JobKey(spec.key) if spec.key is not None else load_for(host, SHARED_HOME_S)
        endpoint = HostEndpoint(spec, key, signals=signals, say=say)
    return Link(spec, endpoint, reaper, signals=signals, say=say)


@contextlib.contextmanager
def _password_memory(spec: JobSpec) -> Iterator[int | None]:
    """Make memory for the user's password for etcd, if there is one."""
    password = ""
    if spec.rdzv_backend == "etcd" and spec.endpoint is not None:
        from dure.store.etcd_gateway import EtcdOptions  # lazy: few jobs use it, it brings ssl

        password = EtcdOptions.read(spec.endpoint, dict(spec.rdzv_conf)).password
    if not password:
        yield None
        return
    with _secret_memory("dure-etcd-password") as fd:
        os.pwrite(fd, password.encode(), 0)
        yield fd


@contextlib.contextmanager
def _secret_memory(name: str) -> Iterator[int]:
    """Make anonymous memory for the key, readable by this user alone; no process maps it.

    The agent writes the key when it joins; processes that have not inherited it open this one's.
    """
    low = memory_file(name)
    try:
        fd = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, _KEY_FD)
    except OSError:  # EINVAL, if the limit is below that number
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE)) from None
    finally:
        os.close(low)
    try:
        os.fchmod(fd, 0o600)
        yield fd
    finally:
        os.close(fd)


def _say_threads(place: Workplace) -> None:
    threads = threads_for(place.spec)
    if threads is not None:
        place.terminal.say(
            f"each of {place.spec.nproc} ranks computes with {threads} "
            f"thread{'s' if threads > 1 else ''}; set OMP_NUM_THREADS for another number"
        )

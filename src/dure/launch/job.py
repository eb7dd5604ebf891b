"""Running a job: from its description to its result.

All that a job holds lies in pipes, anonymous memory and the launcher's own store, so that nothing
remains on disk whatever ends the launcher. The loop itself is in `dure.launch.loop`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
import uuid
from collections.abc import Iterator

from dure import env
from dure.errors import LaunchError, StoreError, UsageError
from dure.launch.environment import (
    MASTER_ADDR,
    JobAddress,
    Round,
    rank_variables,
)
from dure.launch.guarding import guarded
from dure.launch.loop import JobLoop
from dure.launch.numa import threads_for
from dure.launch.ports import reserve_port
from dure.launch.processes import adopting_orphans
from dure.launch.program import check_program
from dure.launch.report import root_cause, summary
from dure.launch.signals import caught_signals
from dure.launch.spawn import RankProcess, start_rank
from dure.launch.spec import Exit, JobResult, JobSpec, RankResult
from dure.launch.supervisor import Supervisor, Timing
from dure.launch.terminal import Terminal
from dure.launch.zygote import Zygote, usable, zygote_for
from dure.store.address import resolve
from dure.store.key import JobKey, mint
from dure.store.server import StoreServer, listen

__all__ = ["run_job"]

_SETTLE_S = 1.0
"""For a rank to notice that a peer has gone, over any engine, and to write its flight record."""


def run_job(spec: JobSpec) -> JobResult:
    """Start the ranks of a job on this host, show their output, and return when all have ended.

    If a rank fails, all others are ended with everything they started (but see
    `JobSpec.keep_going`). SIGINT, SIGTERM and SIGHUP
    end the job as well, if this is called on the main thread. When it returns, or raises, no
    process of the job is left.

    Args:
        spec: What to start.

    Returns:
        What became of each rank. A failure of the program is a result, not an exception: see
        `JobResult.check`.

    Raises:
        UsageError: The job cannot be started as asked: no such file or module, no process.
        LaunchError: This host does not let us start it: no memory, no port, no log directory.

    Threads: one job at a time in a process, for signals and orphans are the process's.
    Cost: a fresh interpreter a rank (some 30 ms of processor time each, and what it imports); with
    a zygote, one import for all of them, and some 20 ms a rank.
    """
    if not sys.platform.startswith("linux"):
        raise UsageError("dure.launch needs Linux", seen=sys.platform)
    check_program(spec)
    started = time.monotonic()
    try:
        name = uuid.uuid4().hex
        with (
            zygote_for(spec, name, threads_for(spec)) as zygote,  # first, for it has much to import
            _address(spec, name) as (address, first),
            caught_signals(spec.signals) as signals,
            adopting_orphans(),
        ):
            terminal = Terminal(spec)
            supervisor = Supervisor(
                spec.nproc, _timing(spec), keep_going=spec.keep_going or spec.elastic
            )
            loop = JobLoop(address.name, supervisor, terminal, signals)
            try:
                terminal.begin(first)
                with guarded(name, shows=spec.elastic and spec.on_line is None) as guardian:
                    ready = usable(zygote, signals, terminal.say)
                    _start_ranks(spec, address, first, loop, ready)
                    for rank in loop.ranks if spec.elastic else ():
                        guardian.watch(rank)
                    loop.run()
                result = _result(spec, loop, time.monotonic() - started)
                for line in summary(result):
                    terminal.say(line)
                terminal.conclude(result)
                terminal.finish()
                loop.drain_terminal()
            finally:
                loop.close()
                terminal.close()
            return result
    except (OSError, StoreError) as error:
        raise LaunchError(
            "the job could not be started",
            seen=str(error),
            fix="Start fewer ranks, or see what is used up (`ulimit -a`, `df`).",
        ) from error


@contextlib.contextmanager
def _address(spec: JobSpec, name: str) -> Iterator[tuple[JobAddress, Round]]:
    """Host the job's store, keep a port for rank 0, and put the key where ranks inherit it."""
    key = mint() if spec.key is None else JobKey(spec.key)
    with contextlib.ExitStack() as stack:
        port = spec.master_port
        if port is None:
            keeper, port = reserve_port()
            stack.callback(keeper.close)
        key_fd = _key_memory(key)
        stack.callback(os.close, key_fd)
        # Not a TCPStore: DURE_STORE_BIND is for rank 0's store, and this one never leaves the host.
        server = StoreServer(listen(resolve(MASTER_ADDR, 0)), key)
        stack.callback(server.retire)
        address = JobAddress(
            name=name,
            key_fd=key_fd,
            key_file=f"/proc/{os.getpid()}/fd/{key_fd}",
        )
        yield (
            address,
            Round(
                hosts=(socket.gethostname(),),
                nprocs=(spec.nproc,),
                master_addr=spec.master_addr or MASTER_ADDR,
                master_port=port,
                store=f"{MASTER_ADDR}:{server.port}",
            ),
        )


def _key_memory(key: JobKey) -> int:
    """Put the key into anonymous memory, readable by this user alone."""
    fd = os.memfd_create("dure-job-key")
    try:
        os.fchmod(fd, 0o600)
        os.write(fd, key.raw)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _timing(spec: JobSpec) -> Timing:
    settle_s = 0.0 if spec.trace_dir is None else _SETTLE_S
    if spec.grace_s is None:
        return Timing(settle_s=settle_s)
    return Timing(
        grace_s=spec.grace_s,
        interrupt_grace_s=spec.grace_s,
        saving_s=spec.grace_s,
        settle_s=settle_s,
    )


def _start_ranks(
    spec: JobSpec, address: JobAddress, round: Round, loop: JobLoop, zygote: Zygote | None
) -> None:
    threads = threads_for(spec)
    if threads is not None:
        loop.terminal.say(
            f"each of {spec.nproc} ranks computes with {threads} "
            f"thread{'s' if threads > 1 else ''}; set OMP_NUM_THREADS for another number"
        )
    for rank in range(spec.nproc):
        variables = rank_variables(spec, rank, address, round, threads)
        environment = env.child_environment(variables)
        loop.add(start_rank(spec, rank, environment, address.key_fd, zygote))
    if zygote is not None:
        zygote.close()  # there are no others to start


def _result(spec: JobSpec, loop: JobLoop, elapsed_s: float) -> JobResult:
    """Put together what the supervisor, the processes and the reports know."""
    supervisor = loop.supervisor
    ranks = tuple(_rank_result(loop, process) for process in loop.ranks)
    failure = None
    if supervisor.first_failure is not None:
        failure = root_cause(ranks[supervisor.first_failure], ranks)
    went_on = (spec.keep_going or spec.elastic) and any(
        map(supervisor.succeeded, range(spec.nproc))
    )
    if failure is not None and not went_on:
        code = failure.status
    elif supervisor.interrupted_by is not None:
        code = 128 + supervisor.interrupted_by
    else:
        code = 0
    return JobResult(
        exit_code=code,
        ranks=ranks,
        elapsed_s=elapsed_s,
        first_failure=failure,
        interrupted_by=supervisor.interrupted_by,
        outlived=tuple(loop.outlived.items()),
    )


def _rank_result(loop: JobLoop, process: RankProcess) -> RankResult:
    rank = process.rank
    report = loop.reports[rank]
    return RankResult(
        rank=rank,
        host=process.host,
        pid=process.pid,
        exit=loop.supervisor.exits.get(rank, Exit(signal=9)),
        ended_by_launcher=rank in loop.supervisor.ended_by_launcher,
        crash=report.crash,
        stack=report.stack,
    )

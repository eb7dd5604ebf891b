"""One round on one host: its ranks are started, watched until none is left, and told of.

What all rounds of a job share on a host is its `Workplace`. A round ends by itself when its ranks
do, or when the overseer (`dure.launch.agent`) or a signal says so; how, the supervisor decides.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

from dure import env
from dure.launch.loop import JobLoop, Overseer
from dure.launch.ranks.cores import threads_for
from dure.launch.ranks.environment import JobAddress, Round, rank_log_dir, rank_variables
from dure.launch.ranks.errorfiles import error_file, known_crash
from dure.launch.ranks.spawn import RankProcess, start_rank
from dure.launch.ranks.zygote import Zygote
from dure.launch.show.terminal import Terminal
from dure.launch.spec import Exit, JobSpec, RankResult
from dure.launch.supervisor import Supervisor, Timing

__all__ = ["RoundRun", "Workplace"]

_SETTLE_S = 1.0
"""For a rank to notice that a peer has gone, over any engine, and to write its flight record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """What all rounds of a job share on this host.

    Args:
        spec: The job.
        address: What its processes inherit.
        host: This host's name.
        terminal: Where output goes.
        signals: The pipe in which signals to the launcher arrive.
        zygote: What ranks are forked from, if anything.
    """

    spec: JobSpec
    address: JobAddress
    host: str
    terminal: Terminal
    signals: int
    zygote: Zygote | None


class RoundRun:
    """A round that runs here; call `close` in the end, whatever happens.

    Args:
        place: What it shares with other rounds.
        round: Who takes part.
        held: Whether ranks that end are only noted (`Supervisor`).
    """

    def __init__(self, place: Workplace, round: Round, *, held: bool) -> None:
        self.round = round
        self._place = place
        self._numbers: dict[int, int] = {}  # of ranks that were replaced, by local rank
        self._threads = threads_for(place.spec)
        self.supervisor = Supervisor(round.nproc, _timing(place.spec), held=held)
        self.loop = JobLoop(place.address.name, self.supervisor, place.terminal, place.signals)
        if place.zygote is not None:
            self.loop.spared = (place.zygote.pid,)

    def start(self) -> None:
        """Start all ranks.

        Raises:
            OSError: One cannot be started; `close` ends the others.
        """
        self._place.terminal.begin(self.round)
        for local_rank in range(self.round.nproc):
            self.loop.add(self._start(local_rank, self.round))
        spec, zygote = self._place.spec, self._place.zygote
        may_restart = spec.max_restarts > 0 or spec.elastic or spec.nnodes[0] != spec.nnodes[1]
        if zygote is not None and not may_restart:
            zygote.close()

    def replace(self, local_rank: int, times: int, store: str) -> None:
        """Start a rank again that has ended, for the `times`-th time.

        Args:
            local_rank: Which of this host's.
            times: How often it has been replaced then.
            store: host:port of the job's store, which may have moved since the round began.
        """
        again = replace(self.round, number=times, store=store)
        if self._place.spec.log_dir is not None:
            directory = rank_log_dir(self._place.spec.log_dir, again.rank(local_rank), times)
            with contextlib.suppress(OSError):  # a full disk must not end the job
                directory.mkdir(parents=True, exist_ok=True)  # for its error file
        self._numbers[local_rank] = times
        self.loop.replace(local_rank, self._start(local_rank, again))

    def run(self, overseer: Overseer) -> None:
        """Return when no process of the round is left."""
        self.loop.oversee(overseer)
        self.loop.run()

    def catches(self, number: int) -> bool:
        """Tell whether a rank has a handler for signal `number`."""
        return any(process.catches(number) for process in self.loop.ranks)

    def close(self) -> None:
        """Kill what is left, and release everything."""
        self.loop.close()

    def results(self) -> tuple[RankResult, ...]:
        """Return what is known of every rank of this host."""
        return tuple(map(self.result, range(len(self.loop.ranks))))

    def result(self, local_rank: int) -> RankResult:
        """Return what is known of one rank."""
        process, report = self.loop.ranks[local_rank], self.loop.reports[local_rank]
        place, number = self._place, self._numbers.get(local_rank, self.round.number)
        path = error_file(place.spec, place.address.name, process.rank, number)
        expected = Exit(signal=9) if report.crash is None else Exit(code=report.crash.exit_code)
        exit = self.supervisor.exits.get(local_rank, expected)
        return RankResult(
            rank=process.rank,
            host=self._place.host,
            pid=process.pid,
            exit=exit,
            ended_by_launcher=local_rank in self.supervisor.ended_by_launcher,
            crash=known_crash(path, report.crash, exit),
            stack=report.stack,
            last=report.last,
            progress="" if report.step is None else str(report.step),
            finished=report.finished,
        )

    def _start(self, local_rank: int, round: Round) -> RankProcess:
        place, rank = self._place, self.round.rank(local_rank)
        variables = rank_variables(place.spec, local_rank, place.address, round, self._threads)
        environment = env.child_environment(variables)
        secrets, zygote = place.address.secrets, place.zygote
        return start_rank(place.spec, rank, environment, secrets, zygote, local_rank)


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

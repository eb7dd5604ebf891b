"""A job on this host alone: its rounds, one after another, until one needs no other.

Nothing is decided between hosts here, so the job has no state except the rounds. From the
death of a rank to SIGTERM for the others, a reader crosses three objects:

1. `RoundRun` (round.py) finds the rank's pidfd readable.
2. `Supervisor` (supervisor.py) notes the first failure and returns the measures.
3. `JobProcesses` (ranks/processes.py) finds the processes of the job and signals them.

`LocalJob` does what is left: it starts the next round while restarts are left, or, in an elastic
job, replaces dead ranks within the only round. The ranks' store is a server in this process.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace

from dure.launch.agent.events import JobOutcome
from dure.launch.backoff import SHORT_ROUND_S, restart_delay
from dure.launch.ranks.environment import MASTER_ADDR, Round
from dure.launch.ranks.ports import reserve_port
from dure.launch.ranks.report import root_cause
from dure.launch.round import RoundRun, Workplace
from dure.launch.show.summary import summary
from dure.launch.signals import first_of
from dure.launch.spec import HANG, JobResult, RankResult
from dure.launch.supervisor import Measure, Policy, RoundPhase
from dure.store.address import resolve
from dure.store.key import JobKey, mint
from dure.store.listener import listen
from dure.store.server import StoreServer

__all__ = ["LocalJob"]


class LocalJob:
    """Runs a job whose ranks are all on this host.

    Args:
        place: Shared by its rounds.

    Attributes:
        interrupted_by: The signal that asked the launcher to end, if one did.
        outlived: Processes that ranks left behind and the launcher ended, by number.
        ranks: The results of the ranks in the last round.
        node: This host's number: 0.
    """

    node = 0

    def __init__(self, place: Workplace) -> None:
        self.interrupted_by: int | None = None
        self.outlived: dict[int, str] = {}
        self.ranks: tuple[RankResult, ...] = ()
        spec = replace(place.spec, run_id=place.spec.run_id or uuid.uuid4().hex)
        self._place = replace(place, spec=spec)
        self._holds = spec.elastic or spec.keep_going
        self._restarts = 0
        self._elastic = _ElasticRound(0)

    def work(self) -> JobOutcome:
        """Run the job until it is over."""
        spec = self._place.spec
        key = mint() if spec.key is None else JobKey(spec.key)
        os.pwrite(self._place.address.key_fd, key.raw, 0)
        # Not a TCPStore: DURE_STORE_BIND is for rank 0's store, and this one never leaves the host.
        server = StoreServer(listen(resolve(MASTER_ADDR, 0)), key)
        try:
            return self._rounds(f"{MASTER_ADDR}:{server.port}")
        finally:
            server.stop()

    def _rounds(self, store: str) -> JobOutcome:
        number = short_rounds = 0
        while True:
            began = time.monotonic()
            with self._round(number, store) as run:
                failure = self._failure(run)
            if failure is None or self._holds or not self._may_restart():
                return self._outcome(failure)
            short = time.monotonic() - began < SHORT_ROUND_S
            short_rounds = short_rounds + 1 if short else 0
            self._restarts += 1
            number += 1
            delay_s = restart_delay(short_rounds, self._place.spec.longest_restart_delay_s)
            self._announce_restart(failure, number, delay_s)
            self.ranks = ()
            self._pause(delay_s)
            if self.interrupted_by is not None:
                return JobOutcome(code=128 + self.interrupted_by)

    @contextlib.contextmanager
    def _round(self, number: int, store: str) -> Iterator[RoundRun]:
        """Run one round to its end, and release it after the `with` block."""
        spec, host = self._place.spec, self._place.host
        with contextlib.ExitStack() as kept:
            port = spec.master_port
            if port is None:
                keeper, port = reserve_port()
                kept.callback(keeper.close)
            layout = Round.of(
                number=number,
                hosts=(host,),
                nprocs=(spec.nproc,),
                master_addr=spec.master_addr or MASTER_ADDR,
                master_port=port,
                store=store,
            )
            policy = Policy.HOLD if self._holds else Policy.FAIL_FAST
            run = RoundRun(self._place, layout, policy)
            kept.callback(run.close)
            self._elastic = _ElasticRound(spec.nproc)
            run.start()
            run.run((lambda now: self._attend(run, now)) if self._holds else None)
            self.ranks = run.results()
            self.outlived |= run.outlived
            self.interrupted_by = run.supervisor.interrupted_by
            yield run

    # --- after a round -----------------------------------------------------------------------

    def _failure(self, run: RoundRun) -> RankResult | None:
        """Return the failure that explains the round's end, or one that the job outlived."""
        if self._holds:
            if self._elastic.succeeded == run.round.nproc:
                run.warn_of_no_elastic("without it a job needs no --elastic")
            first = self._elastic.first_failure
        else:
            local = run.supervisor.first_failure
            first = None if local is None else self.ranks[local]
        return None if first is None else root_cause(first, self.ranks)

    def _may_restart(self) -> bool:
        return self.interrupted_by is None and self._restarts < self._place.spec.max_restarts

    def _outcome(self, failure: RankResult | None) -> JobOutcome:
        interrupted = self.interrupted_by
        if interrupted is not None and (failure is None or self._holds):
            return JobOutcome(code=128 + interrupted, ranks=self.ranks)
        if failure is None or self._elastic.succeeded:
            return JobOutcome(code=0, failure=failure, ranks=self.ranks)
        code = failure.status or 1
        return JobOutcome(code=code, failure=failure, ranks=self.ranks, limit=self._limit())

    def _limit(self) -> str:
        """Say which limit of the user's lets the job fail."""
        spec, limits = self._place.spec, list[str]()
        if self._holds and spec.min_ranks > 1 and self._elastic.alive < spec.min_ranks:
            limits.append(f"fewer than --min-ranks {spec.min_ranks} live")
        if spec.max_restarts:
            limits.append(f"restarts: {self._restarts} of {spec.max_restarts} used")
        return ", ".join(limits)

    def _announce_restart(self, failure: RankResult, number: int, delay_s: float) -> None:
        spec, terminal = self._place.spec, self._place.terminal
        terminal.note(
            "restart", number=number, restarts=self._restarts, why=failure.how, delay_s=delay_s
        )
        later = f" in {delay_s:g} s" if delay_s else ""
        ranks = f"{spec.nproc} rank{'s' if spec.nproc > 1 else ''}"
        if failure.crash is not None and failure.crash.type == HANG:
            result = JobResult(exit_code=1, ranks=self.ranks, elapsed_s=0, first_failure=failure)
            for line in summary(result, terminal.has_shown):
                terminal.say(line)
        terminal.say(
            f"rank {failure.rank} on {failure.host} {failure.how}; round {number} starts{later} "
            f"with {ranks} (restarts: {self._restarts} of {spec.max_restarts})"
        )

    def _pause(self, seconds: float) -> None:
        """Wait before a restart, unless the user asks to end."""
        spec, signals = self._place.spec, self._place.signals
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0 and self.interrupted_by is None:
            select.select([signals], [], [], left_s)
            self.interrupted_by = first_of(spec.signals, signals)

    # --- an elastic round --------------------------------------------------------------------

    def _attend(self, run: RoundRun, now: float) -> list[Measure]:
        """Replace ranks that have died while restarts are left; stop if too few live."""
        supervisor, elastic = run.supervisor, self._elastic
        if supervisor.phase is not RoundPhase.RUNNING:
            return []
        for local in sorted(supervisor.exits.keys() - elastic.gone):
            if supervisor.succeeded(local):
                elastic.succeeded += 1
            else:
                elastic.first_failure = elastic.first_failure or run.result(local)
                if not elastic.succeeded and self._restarts < self._place.spec.max_restarts:
                    self._replace(run, local)
                    continue
            elastic.gone.add(local)
        too_few = not elastic.succeeded and elastic.alive < self._place.spec.min_ranks
        if too_few or not elastic.alive:
            return supervisor.stop(now, explain=elastic.first_failure is not None)
        return []

    def _replace(self, run: RoundRun, local: int) -> None:
        self._restarts += 1
        times = self._elastic.replaced.get(local, 0) + 1
        self._elastic.replaced[local] = times
        run.replace(local, times, self._restarts)


class _ElasticRound:
    """What has become of the ranks of a round in which they may be replaced.

    Attributes:
        succeeded: How many ranks have ended well. Then the program is on its way out: no rank is
            replaced any more, and few may be left.
        gone: Ranks that have ended and are not replaced.
        replaced: How often each rank was replaced.
        first_failure: The first rank that failed, as it was then.
    """

    def __init__(self, nproc: int) -> None:
        self.succeeded = 0
        self.gone: set[int] = set()
        self.replaced: dict[int, int] = {}
        self.first_failure: RankResult | None = None
        self._nproc = nproc

    @property
    def alive(self) -> int:
        """How many ranks live, those included that are being replaced."""
        return self._nproc - len(self.gone)

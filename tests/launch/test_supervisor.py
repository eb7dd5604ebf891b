"""The state machine that ends jobs: single paths, and random histories."""

import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dure.launch.spec import Exit
from dure.launch.supervisor import (
    AskStacks,
    Kill,
    Measure,
    Policy,
    RoundPhase,
    Signal,
    Supervisor,
    Sweep,
    Timing,
)

TIMING = Timing()
TERM_ALL = Signal(signal.SIGTERM, everything=True)
KILL_ALL = Signal(signal.SIGKILL, everything=True)


def test_a_failure_is_noted_where_others_decide() -> None:
    machine = Supervisor(3, TIMING, Policy.REPORT)
    assert machine.exited(1, Exit(signal=9), 0.0) == []
    assert machine.crashed(2, 0.0) == []
    assert (machine.phase, machine.first_failure) == (RoundPhase.RUNNING, 1)


def test_a_held_round_does_not_end_with_its_ranks() -> None:
    machine = Supervisor(2, TIMING, Policy.HOLD)
    assert machine.exited(0, Exit(code=0), 0.0) == machine.exited(1, Exit(code=0), 0.0) == []
    assert machine.phase is RoundPhase.RUNNING


def test_a_held_round_notes_ends_until_it_is_stopped() -> None:
    machine = Supervisor(3, TIMING, Policy.HOLD)
    assert machine.exited(1, Exit(signal=9), 0.0) == []
    assert machine.crashed(2, 0.0) == []
    assert machine.exited(0, Exit(code=0), 1.0) == []
    assert machine.exited(2, Exit(code=1), 2.0) == []
    assert machine.phase is RoundPhase.RUNNING
    machine.replaced(1)
    assert machine.alive == (1,)
    machine.exited(1, Exit(code=0), 3.0)
    assert machine.stop(4.0) == [Sweep()]
    assert machine.phase is RoundPhase.LEAVING
    assert machine.ended_by_launcher == frozenset()


def test_a_rank_of_a_held_round_that_crashed_and_does_not_exit_is_killed() -> None:
    machine = Supervisor(2, TIMING, Policy.HOLD)
    machine.crashed(1, 0.0)
    assert machine.wake_at == 5.0
    assert machine.tick(4.9) == []
    assert machine.tick(5.0) == [Kill(1)]
    assert machine.tick(5.1) == []
    machine.exited(1, Exit(signal=9), 5.2)
    assert machine.wake_at is None


def test_a_rank_of_a_held_round_that_hangs_is_killed() -> None:
    assert Supervisor(2, TIMING, Policy.HOLD).hung(1, 0.0) == [Kill(1)]


def test_a_rank_of_a_held_round_that_hangs_gets_time_to_write_its_flight_record() -> None:
    machine = Supervisor(2, Timing(settle_s=1.0), Policy.HOLD)
    assert machine.hung(1, 0.0) == machine.hung(1, 0.5) == []
    assert machine.wake_at == 1.0
    assert machine.tick(0.9) == []
    assert machine.tick(1.0) == [Kill(1)]
    assert machine.tick(1.1) == []
    machine.exited(1, Exit(signal=9), 1.2)
    assert machine.wake_at is None


def test_a_round_that_is_stopped_from_elsewhere_ends_its_ranks() -> None:
    machine = Supervisor(2, TIMING, Policy.REPORT)
    assert machine.stop(0.0, explain=True) == [AskStacks((0, 1))]
    machine.explained(0, 0.1)
    assert machine.explained(1, 0.1) == [TERM_ALL]
    assert machine.first_failure is None
    assert machine.ended_by_launcher == {0, 1}
    assert machine.stop(0.2) == []
    assert Supervisor(2, TIMING).stop(0.0) == [TERM_ALL]


def test_signals_of_one_request_do_not_shorten_the_time_for_saving() -> None:
    machine = Supervisor(2, TIMING)
    machine.interrupted(signal.SIGTERM, 0.0, caught=True)
    assert machine.interrupted(signal.SIGHUP, 0.01, caught=True) == []
    assert machine.interrupted(signal.SIGTERM, 1.9, caught=True) == []
    assert machine.phase is RoundPhase.SAVING
    assert machine.interrupted(signal.SIGTERM, 2.0, caught=True) == [KILL_ALL]


def test_ranks_that_hang_end_the_round_and_say_where_they_are() -> None:
    machine = Supervisor(2, TIMING)
    assert machine.hung(1, 10.0) == [AskStacks((0, 1))]
    assert machine.first_failure == 1
    machine.explained(0, 10.1)
    assert machine.explained(1, 10.1) == [TERM_ALL]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_that_ranks_catch_goes_to_them_alone_and_gives_time(number: int) -> None:
    machine = Supervisor(2, TIMING)
    assert machine.interrupted(number, 0.0, caught=True) == [Signal(number, everything=False)]
    assert machine.wake_at == 30.0
    assert Supervisor(2, TIMING).interrupted(number, 0.0) == [TERM_ALL]
    assert Supervisor(2, TIMING).interrupted(signal.SIGHUP, 0.0, caught=True) == [TERM_ALL]


def test_failure_asks_the_others_before_it_ends_them() -> None:
    machine = Supervisor(3, TIMING)
    assert machine.exited(1, Exit(signal=9), 0.0) == [AskStacks((0, 2))]
    assert machine.explained(0, 0.01) == []
    assert machine.explained(2, 0.02) == [TERM_ALL]
    assert machine.first_failure == 1
    assert machine.ended_by_launcher == {0, 2}
    assert machine.exited(0, Exit(signal=15), 0.1) == []
    assert machine.exited(2, Exit(signal=15), 0.1) == [Sweep()]


def test_silent_ranks_are_not_waited_for_long() -> None:
    machine = Supervisor(2, TIMING)
    machine.exited(1, Exit(code=3), 0.0)
    machine.exited(0, Exit(code=5), 0.0)  # which does not change which was the first
    assert machine.first_failure == 1
    machine = Supervisor(2, TIMING)
    machine.exited(1, Exit(code=3), 0.0)
    assert machine.wake_at == 0.3
    assert machine.tick(0.2) == []
    assert machine.tick(0.3) == [TERM_ALL]


def test_ranks_that_write_flight_records_get_time_to_fail_by_themselves() -> None:
    machine = Supervisor(3, Timing(settle_s=1.0))
    machine.exited(1, Exit(signal=9), 0.0)
    machine.explained(0, 0.01)
    assert machine.explained(2, 0.02) == []
    assert machine.exited(0, Exit(code=1), 0.4) == []
    assert machine.tick(0.9) == []
    assert machine.tick(1.0) == [TERM_ALL]
    assert machine.ended_by_launcher == {2}
    machine = Supervisor(2, Timing(settle_s=1.0))
    machine.exited(1, Exit(signal=9), 0.0)
    assert machine.exited(0, Exit(code=1), 0.1) == [TERM_ALL, Sweep()]  # nobody is waited for
    assert machine.ended_by_launcher == frozenset()


def test_crashed_rank_may_get_to_its_end() -> None:
    machine = Supervisor(2, TIMING)
    assert machine.crashed(0, 0.0) == [AskStacks((1,))]
    assert machine.explained(1, 0.01) == []
    assert machine.exited(0, Exit(code=1), 0.05) == [TERM_ALL]
    assert machine.ended_by_launcher == {1}
    machine = Supervisor(1, TIMING)
    assert machine.crashed(0, 0.0) == machine.tick(0.5) == []
    assert machine.tick(0.6) == [TERM_ALL]  # it hangs
    assert machine.ended_by_launcher == {0}


def test_grace_over_kills_until_nothing_is_left() -> None:
    machine = Supervisor(2, TIMING)
    machine.exited(1, Exit(code=1), 0.0)
    machine.explained(0, 0.0)
    assert machine.tick(TIMING.grace_s) == [KILL_ALL]
    machine.exited(0, Exit(signal=9), 5.0)
    machine.swept(2, 5.0)
    assert machine.tick(5.1) == [KILL_ALL, Sweep()]
    machine.swept(0, 5.1)
    assert machine.phase is RoundPhase.DONE


def test_a_host_that_was_given_up_kills_at_once() -> None:
    machine = Supervisor(2, TIMING)
    assert machine.fence(0.0) == [KILL_ALL]
    assert machine.fence(0.1) == []


def test_where_nothing_helps_it_gives_up() -> None:
    machine = Supervisor(1, TIMING)
    machine.interrupted(signal.SIGINT, 0.0)
    assert machine.interrupted(signal.SIGINT, 2.0) == [KILL_ALL]
    machine.tick(7.0)
    assert machine.phase is RoundPhase.DONE


class World:
    """Ranks with a life of their own: when they end, what they obey, whom they leave behind."""

    def __init__(
        self, plans: list[tuple[float, int, bool, bool, int]], stopped_at: float = 1e9
    ) -> None:
        self.plans = plans
        self.orphans = 0
        self.signals: list[int] = []
        self.pending: list[tuple[float, int, Exit]] = [
            (end, rank, Exit(code=code)) for rank, (end, code, *_) in enumerate(plans)
        ]
        self.machine = Supervisor(len(plans), TIMING)
        self.stopped_at = stopped_at

    def act(self, measures: list[Measure], now: float) -> None:
        for measure in measures:
            if isinstance(measure, AskStacks):
                for rank in measure.ranks:
                    if self.plans[rank][2]:
                        self.act(self.machine.explained(rank, now), now)
            elif isinstance(measure, Signal):
                self.send(measure, now)
            elif isinstance(measure, Sweep):
                self.act(self.machine.swept(self.orphans, now), now)

    def send(self, measure: Signal, now: float) -> None:
        self.signals.append(measure.number)
        certain = measure.number == signal.SIGKILL
        if measure.everything and certain:
            self.orphans = 0
        for rank in self.machine.alive:
            if certain or self.plans[rank][3]:
                self.pending = [entry for entry in self.pending if entry[1] != rank]
                self.pending.append((now, rank, Exit(signal=measure.number)))

    def run(self, interrupts: list[float], horizon: float) -> float:
        """Advance to DONE; return when that was."""
        now = 0.0
        while self.machine.phase is not RoundPhase.DONE:
            times = [entry[0] for entry in self.pending] + interrupts
            times += [] if self.machine.wake_at is None else [self.machine.wake_at]
            times += [self.stopped_at]
            now = max(now, min(times))
            assert now < horizon
            for entry in [e for e in self.pending if e[0] <= now]:
                if entry in self.pending:
                    self.pending.remove(entry)
                    self.orphans += self.plans[entry[1]][4]
                    self.act(self.machine.exited(entry[1], entry[2], now), now)
            while interrupts and interrupts[0] <= now:
                interrupts.pop(0)
                self.act(self.machine.interrupted(signal.SIGINT, now), now)
            if now >= self.stopped_at:
                self.stopped_at = 1e9
                self.act(self.machine.stop(now, explain=True), now)
            self.act(self.machine.tick(now), now)
        return now


PLAN = st.tuples(
    st.floats(0, 20),  # when it ends by itself
    st.sampled_from([0, 0, 0, 1, 77]),  # with which code
    st.booleans(),  # whether it tells its stack
    st.booleans(),  # whether it obeys SIGINT and SIGTERM
    st.integers(0, 2),  # how many processes it leaves behind
)


@settings(max_examples=300)
@given(
    plans=st.lists(PLAN, min_size=1, max_size=6),
    interrupts=st.lists(st.floats(0, 20), max_size=2).map(sorted),
    stopped_at=st.floats(0, 40),
)
def test_random_history_ends_in_time_with_everyone_gone(
    plans: list[tuple[float, int, bool, bool, int]], interrupts: list[float], stopped_at: float
) -> None:
    world = World(plans, stopped_at)
    failures = [end for end, code, *_ in plans if code]
    first_trouble = min([*failures, *interrupts, stopped_at, max(end for end, *_ in plans)])
    longest = TIMING.crash_s + TIMING.grace_s + TIMING.leave_s + 1
    end = world.run(list(interrupts), first_trouble + longest)
    machine = world.machine
    assert machine.alive == ()
    assert world.orphans == 0
    if machine.first_failure is None and not interrupts and stopped_at > 20:
        assert all(code == 0 for _, code, *_ in plans)
    if signal.SIGKILL in world.signals and machine.interrupted_by is None:
        assert signal.SIGTERM in world.signals[: world.signals.index(signal.SIGKILL)]
    assert end >= 0

"""Orders of events in jobs of many hosts: a virtual clock, and every seed is another history."""

from __future__ import annotations

import itertools

import pytest

from tests.launch.agent.simulation import Faults, World

SEEDS = range(12)
SIZES = (2, 3, 8, 40)
HISTORIES = [*itertools.product(SEEDS, SIZES), (0, 200)]


def outcome_of(world: World) -> int:
    """Run a job; return its exit code, which is the same on all hosts that have one."""
    world.run()
    codes = {host.outcome.code for host in world.hosts if host.outcome and not host.leaves}
    assert len(codes) == 1, codes
    return codes.pop()


@pytest.mark.parametrize("elastic", [False, True], ids=["rounds", "elastic"])
@pytest.mark.parametrize(("seed", "count"), HISTORIES)
def test_each_death_counts_once_although_messages_are_lost_late_and_doubled(
    seed: int, count: int, elastic: bool
) -> None:
    faults = Faults(loss=0.05, late_s=0.3, deaths=3)
    world = World(seed, count, faults, elastic=elastic, lease_s=60.0)
    assert outcome_of(world) == 0
    state = world.coordinator.state
    assert world.died == 3
    if elastic:
        assert state.restarts == 3
    else:  # ranks that die in the same round cost one restart, and so does a lost connection
        assert 1 <= state.restarts == state.plan.number <= 3


@pytest.mark.parametrize("elastic", [False, True], ids=["rounds", "elastic"])
@pytest.mark.parametrize(("seed", "count"), HISTORIES)
def test_deaths_stops_cuts_and_a_slow_coordinator_never_let_two_rounds_run(
    seed: int, count: int, elastic: bool
) -> None:
    """`World.check` looks at every moment; here all must come to an end, and to the same one."""
    faults, most = Faults(loss=0.02, late_s=0.2, deaths=2), max(1, count - seed % 2)  # or a spare
    world = World(seed, count, faults, elastic=elastic, min_hosts=1, max_hosts=most)
    draw = world.draw
    for host in draw.sample(world.hosts[1:], min(count - 1, 5)):
        start, long_s = draw.uniform(0.0, 20.0), draw.choice([0.5, 5.0, 9.0, 13.0, 30.0])
        what = draw.choice(["cut", "stop", "kill", "leave"])

        def spoil(host=host, what=what, long_s=long_s) -> None:
            if what == "kill":
                host.kill()
            elif what == "leave":
                host.leaves = True
                host.run()
            elif what == "cut":
                host.cut_until = world.now + long_s
            else:
                host.stopped_until = world.now + long_s

        world.at(start, spoil)
    longest_s = 8.0 if elastic else 20.0  # longer than a lease: then all hosts are given up
    for start in (5.0, 15.0):
        pause_s = draw.choice([1.0, longest_s])
        world.at(draw.uniform(0.0, start), lambda pause_s=pause_s: world.pause(pause_s))
    assert outcome_of(world) == 0

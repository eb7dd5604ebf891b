"""Which part of a cut job waits, by the hosts that fell silent; and what people are told then."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from dure.launch.agent.duties import Plan, Wait
from dure.launch.agent.events import Ended, Expired, Joined, Left, Lost, Ready
from dure.launch.agent.machine import Machine, Phase
from dure.launch.agent.parts import WAITS, Parts
from dure.launch.agent.settings import Settings
from dure.launch.agent.vain import cut_off, too_few


def joined(name: str, nproc: int = 1) -> Joined:
    """Return how an agent joins: `a` is the agent a of host-a, `a2` a later one of the same."""
    return Joined(name, f"host-{name[0]}", nproc)


def round_of(*names: str, nprocs: tuple[int, ...] = ()) -> Plan:
    hosts = tuple(f"host-{name[0]}" for name in names)
    return Plan(number=0, members=names, hosts=hosts, nprocs=nprocs or (1,) * len(names))


def parts(*silent: str, nproc: int = 1) -> Parts:
    found = Parts()
    for name in silent:
        found.lose(joined(name, nproc))
    return found


@pytest.mark.parametrize(
    ("silent", "plan", "here", "parted"),
    [
        ("", round_of("a", "b", "c"), "a", False),  # the others are known to have died
        ("b", round_of("a", "b"), "a", False),
        ("a", round_of("a", "b"), "b", True),
        ("ab", round_of("a", "b", "c"), "c", True),
        ("a", round_of("a", "b", "c"), "c", True),  # b has died; of a and c, a was the first
        ("a", round_of("a", "b", "c", nprocs=(1, 1, 2)), "c", False),
        ("a", round_of("a", "b", nprocs=(2, 3)), "b", False),
        ("a", round_of("a", "b"), "bc", True),  # c has no vote
        ("ax", round_of("a", "b", "c"), "bc", False),  # nor has x, which was a spare
    ],
)
def test_the_members_of_the_last_round_vote(
    silent: str, plan: Plan, here: str, parted: bool
) -> None:
    assert parts(*silent).parted(plan, [joined(a) for a in here]) == parted


@pytest.mark.parametrize(
    ("silent", "nproc", "here", "parted"),
    [("a", 1, ["b", "c"], False), ("ab", 1, ["c"], True), ("a", 3, ["b", "c"], True)],
)
def test_before_the_first_round_all_that_came_vote(
    silent: str, nproc: int, here: list[str], parted: bool
) -> None:
    found = parts(*silent, nproc=nproc)
    assert found.parted(None, [joined(name) for name in here]) == parted


def test_a_host_that_is_here_again_votes_with_those_it_came_to() -> None:
    found, plan = parts("a"), round_of("a", "b")
    assert found.parted(plan, [joined("b")])
    assert not found.parted(plan, [joined("b"), joined("a2")]), "under whatever name"


def test_a_host_that_comes_again_is_not_silent_any_more() -> None:
    found = parts("a", "b")
    found.hear("host-a")
    assert list(found.silent) == ["b"]
    found.hear("host-c")
    assert list(found.silent) == ["b"]


def test_that_a_round_started_without_silent_hosts_is_known_for_good() -> None:
    found = Parts()
    found.go_on()
    assert not found.aware
    found.lose(joined("a"))
    assert found.aware and not found.prevailed
    found.go_on()
    assert (found.silent, found.prevailed, found.aware) == ({}, True, True)
    found.go_on()
    assert found.aware
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=Parts) == found


def test_who_is_cut_off_is_told_from_whom() -> None:
    why = cut_off(Settings(join_timeout_s=7), parts("a", "b"))
    assert "host-a, host-b" in why
    assert "7 s" in why


def test_who_came_is_told_in_the_order_of_nodes_and_that_others_could_not() -> None:
    settings = Settings(min_hosts=3, endpoint="there:1")
    came = [joined("a"), joined("b"), joined("c")]
    some, all_of_them = (
        too_few(settings, came, ["c", "a"]),
        too_few(settings, came, ["a", "b", "c"]),
    )
    assert "there:1" in some and "2 of 3 (host-c, host-a)" in some
    assert "excluded" in some and "excluded" not in all_of_them
    assert "the endpoint" in too_few(Settings(), [], [])
    assert "(none)" in too_few(Settings(), [], [])


def test_hosts_that_are_lost_before_the_first_round_may_be_the_other_part() -> None:
    machine = Machine(Settings(min_hosts=1, max_hosts=4))
    for name in "abc":
        machine.apply(joined(name))
    for name in "ab":
        machine.apply(Lost(name, silent=True))
    assert (machine.parted, machine.prevails, machine.phase) == (True, False, Phase.GATHERING)
    assert machine.missing == 0, "it is not for hosts that it waits"


def running(**wanted: int) -> Machine:
    """Return a machine whose first round runs on a, b and c, with one rank each."""
    settings = dataclasses.replace(Settings(max_hosts=3, max_restarts=9), **wanted)
    machine = Machine(settings)
    for name in "abc":
        machine.apply(joined(name))
    machine.apply(Ready("a", 0, "10.0.0.1", 1))
    return machine


def end_round(machine: Machine, number: int = 0) -> None:
    for name in machine.agents:
        machine.apply(Ended(name, number))


@pytest.mark.parametrize(("silent", "waits"), [("bc", True), ("c", False)])
def test_a_part_says_that_it_waits(silent: str, waits: bool) -> None:
    machine = running()
    for name in silent:
        machine.apply(Lost(name, silent=True))
    end_round(machine)
    assert machine.parted == waits
    assert [WAITS in note and "host-b, host-c" in note for note in machine.notes] == [True] * waits


def test_a_parted_job_that_waited_in_vain_ends_as_cut_off_with_the_failure_it_had() -> None:
    machine = running()
    for name in "bc":
        machine.apply(Lost(name, silent=True))
    end_round(machine)
    machine.apply(joined("d"))  # enough hosts are there
    duty = machine.duty("a")
    assert isinstance(duty, Wait) and duty.timer is not None
    assert duty.timer.after_s == machine.settings.join_timeout_s
    machine.apply(Expired(duty.timer.name))
    assert machine.outcome is not None
    assert (machine.outcome.code, "cut off" in machine.outcome.why) == (1, True)


def test_the_part_that_goes_on_says_so_in_later_rounds_too() -> None:
    machine = running()
    assert not machine.prevails
    machine.apply(Lost("c", silent=True))
    end_round(machine)
    assert (machine.phase, machine.prevails) == (Phase.RUNNING, True)
    assert (machine.plan and machine.plan.members) == ("a", "b")
    machine.apply(Lost("b"))
    end_round(machine, 1)
    assert (machine.plan and machine.plan.members, machine.prevails) == (("a",), True)
    machine.apply(joined("c2"))
    assert machine.prevails, "the others may live, though their host is here again"


def test_without_the_rule_nobody_is_parted_or_prevails() -> None:
    machine = running(quorum=False)
    machine.apply(Lost("a", silent=True))
    assert (machine.parted, machine.prevails) == (False, False)


def test_who_took_its_leave_or_is_unknown_is_not_silent() -> None:
    machine = running()
    machine.apply(Left("b", 143))
    machine.apply(Ended("b", 0))
    machine.apply(Lost("b", silent=True))
    machine.apply(Lost("x", silent=True))
    assert not machine.prevails


def test_a_host_that_is_here_again_leaves_nobody_over_whom_to_prevail() -> None:
    machine = running()
    machine.apply(Lost("c", silent=True))
    assert machine.prevails
    machine.apply(joined("c2"))
    assert (machine.parted, machine.prevails) == (False, False)

"""Jobs' states for tests, and what happens to them."""

from __future__ import annotations

from dataclasses import replace

from dure.launch.agent.elastic import ElasticMachine
from dure.launch.agent.events import (
    Ended,
    Event,
    Expired,
    Failed,
    Joined,
    Outcome,
    Plan,
    Prepare,
    Ready,
    Settings,
    Stop,
    Wait,
    Work,
)
from dure.launch.agent.machine import Machine
from dure.launch.spec import Crash, Exit, RankResult


def result(
    rank: int, host: str = "host-a", *, code: int = 3, pid: int = 7, peer: int | None = None
) -> RankResult:
    """Return what is told of a rank that has failed, and perhaps blames a peer."""
    crash = Crash(type="PeerLost", message="gone", traceback="", exit_code=code, peer=peer)
    exit = Exit(code=code)
    return RankResult(
        rank=rank, host=host, pid=pid, exit=exit, crash=None if peer is None else crash
    )


def joined(agent: str, nproc: int = 1, node_rank: int | None = None) -> Joined:
    """Return the coming of an agent; a host is named after it."""
    return Joined(agent, f"host-{agent}", nproc, node_rank)


def state_of(agents: str, *, nproc: int = 1, elastic: bool = False, **wanted: int | str) -> Machine:
    """Return a state whose round runs on as many hosts as there may be, unless `wanted` differs."""
    count = len(agents)
    settings = Settings(min_hosts=1 if elastic else count, max_hosts=count)
    machine = (ElasticMachine if elastic else Machine)(replace(settings, **wanted))
    apply(machine, *(joined(agent, nproc) for agent in agents))
    action = machine.action(agents[0])
    if isinstance(action, Wait) and action.timer is not None:
        machine.apply(Expired(action.timer.name))
    ready(machine)
    return machine


def apply(machine: Machine, *events: Event) -> Machine:
    """Let things happen, one after the other."""
    for event in events:
        machine.apply(event)
    return machine


def plan_of(machine: Machine) -> Plan:
    """Return the latest round."""
    assert machine.plan is not None
    return machine.plan


def ready(machine: Machine) -> Plan:
    """Let the first host of a round that begins keep a port; return the round."""
    plan = plan_of(machine)
    first = plan.members[0]
    assert isinstance(machine.action(first), Prepare)
    machine.apply(Ready(first, plan.number, "10.0.0.1", 1))
    assert isinstance(machine.action(first), Work)
    return plan


def fail(machine: Machine, agent: str, local: int = 0, *, times: int = 0, **how: int) -> Failed:
    """Let a worker of the present round fail; return what its agent tells."""
    plan = plan_of(machine)
    rank = sum(plan.nprocs[: plan.node_of(agent)]) + local
    event = Failed(agent, plan.number, local, result(rank, f"host-{agent}", **how), times)
    machine.apply(event)
    return event


def end(machine: Machine) -> None:
    """Let all members do what they must when a round is stopped."""
    plan = plan_of(machine)
    for agent in plan.members:
        if isinstance(machine.action(agent), Stop):
            machine.apply(Ended(agent, plan.number))


def outcome_of(machine: Machine) -> Outcome:
    """Return how a job has ended."""
    assert machine.outcome is not None
    return machine.outcome

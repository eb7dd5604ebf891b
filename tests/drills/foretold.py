"""How a job of a drill must end: the rules of docs/restarts.md, by hand.

Every kill comes when the job is whole again, and two at nearly the same time are one round's or
two, which changes no end while restarts are left. What must make no difference to the end:

- A rank that is stopped and goes on is waited for.
- So is an agent, for a moment. One that is stopped past its deadline has no ranks any more, and
  comes back under another name: a restart of a job that has enough of them.
- Without its reaper a job goes on; only when the launcher dies as well, its files are left.
- Without its zygote a job goes on; ranks that are replaced start afresh.

Who coordinates ends the job for all: told to end, with that code; killed, with 1 for the others.
"""

from __future__ import annotations

import signal

from drills.jobs import ASKED, GONE, Death, Job
from drills.plans import Plan

KILLED = 128 + signal.SIGKILL
TOLD = 128 + signal.SIGTERM


def exit_code(job: Job) -> int:
    """Return the code with which the agents of a job that live to its end must end."""
    code = _end(job.plan, job.deaths)
    return 0 if code is None else code


def goes_on(plan: Plan, deaths: list[Death]) -> bool:
    """Tell whether a job goes on after a history."""
    return _end(plan, deaths) is None


def _end(plan: Plan, deaths: list[Death]) -> int | None:
    """Return the code with which a history has ended a job; None: it goes on."""
    restarts = plan.max_restarts
    for death in deaths:
        fates = {local for _, local in death.who}
        if death.coordinator:
            return TOLD if ASKED in fates else 1
        if not fates or ASKED in fates:
            continue
        if plan.kind == "elastic" and fates == {GONE}:
            continue
        for _ in range(death.times):
            if restarts == 0:
                return 1 if fates == {GONE} else KILLED
            restarts -= 1
    return None

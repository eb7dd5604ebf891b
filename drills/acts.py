"""Carry out the plan of a job: find the planned process, and kill it, stop it or ask it to end.

Some processes are chosen by what they do: a file names a point of the program (`programs`), and the
first process that reaches this point takes the file and dies a moment later.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil

from drills.jobs import Agent, Job
from drills.plans import ASKED, GONE, LEASE_S, Death, Kill
from tests.waiting import listening

_POINTS = {
    "rank 0 during a commit": ("commit", 0.02),
    "worker during a commit": ("commit", 0.02),
    "worker during a restart": ("start", 1.0),
    "newcomer while it joins": ("join", 2.0),
    "newcomer while it gets the state": ("receive", 0.1),
    "survivor while it sends the state": ("send", 0.1),
    "survivor while all regroup": ("agree", 0.2),
}
"""The point of the program that a victim reaches, and a factor for the delay of its death."""

_HELPERS = {"reaper": b"reaper.py", "zygote": b"forking.py"}
"""A part of the command line of a launcher's helper."""


def carry_out(job: Job, kill: Kill) -> Death:
    """Carry out one planned kill.

    Raises:
        Odd: No process reached the point at which one was to die.
    """
    if kill.harmless:
        return _harmless(job, kill)
    if "agent" in kill.victim:
        return _kill_agent(job, kill)
    if kill.victim in _POINTS:
        return _kill_at_point(job, kill)
    return _kill_ranks(job, kill)


def _kill(pid: int, number: int = signal.SIGKILL) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


# ---- ranks -----------------------------------------------------------------------------------


def _kill_ranks(job: Job, kill: Kill) -> Death:
    counts = {"two at once": (2, 0.0), "three in 50 ms": (3, kill.delay_s / 6)}
    count, apart_s = counts.get(kill.victim, (1, 0.0))
    workers = job.workers()
    first = 0 if kill.victim == "rank 0" else int(kill.pick * len(workers))
    chosen = (workers * 2)[first : first + min(count, len(workers))]
    at = time.monotonic()
    for number, worker in enumerate(chosen):
        time.sleep(apart_s if number else 0.0)
        _kill(worker["pid"])
    return Death(kill, at, {worker["rank"] % job.plan.nproc for worker in chosen})


def _kill_at_point(job: Job, kill: Kill) -> Death:
    """Order a death at a point; kill another process first if only its death leads to the point."""
    point, share = _POINTS[kill.victim]
    delay_s = kill.delay_s * share
    before = sum(_POINTS.get(death.kill.victim, ("", 0))[0] == point for death in job.deaths)
    (job.folder / "orders" / point).write_text(str(delay_s))
    death = Death(kill, 0.0, {0}) if point == "commit" else _kill_ranks(job, kill)
    taken = job.folder / "taken"
    job.wait(
        lambda: len(list(taken.glob(f"{point}-*"))) > before or not job.running,
        f"a process at the point {point!r}",
    )
    death.at = time.monotonic() + delay_s
    return death


# ---- agents ----------------------------------------------------------------------------------


def _kill_agent(job: Job, kill: Kill) -> Death:
    """Kill an agent, or ask one to end; also kill the workers that the plan names."""
    agent = _choose_agent(job, kill)
    coordinates = len(job.agents) == 1 or agent is _coordinator(job)
    at = time.monotonic()
    if kill.victim == "agent asked to end":
        agent.due = 128 + signal.SIGTERM
        agent.process.terminate()
        agent.process.wait()
        return Death(kill, at, {ASKED}, coordinates)
    agent.due = -signal.SIGKILL
    who = {GONE}
    if "worker of another" in kill.victim:
        mine = _children(agent)
        others = [w for w in job.workers() if w["pid"] not in mine]
        for worker in others[: 1 if kill.pick < 0.9 else 2]:
            _kill(worker["pid"])
            who.add(worker["rank"] % job.plan.nproc)
        time.sleep(kill.delay_s / 3)
    agent.process.kill()
    agent.process.wait()
    return Death(kill, at, who, coordinates)


def _choose_agent(job: Job, kill: Kill) -> Agent:
    running, coordinator = job.running, _coordinator(job)
    if kill.victim == "coordinator agent" and coordinator is not None:
        return coordinator
    if kill.victim != "agent asked to end":
        running = [a for a in running if a is not coordinator] or running
    return running[int(kill.pick * len(running))]


def _coordinator(job: Job) -> Agent | None:
    """Return the agent that listens at the endpoint, else the first running one."""
    sockets = {f"socket:[{inode}]" for inode in listening(job.port)}
    for agent in job.running:
        with suppress(OSError):
            for link in Path(f"/proc/{agent.process.pid}/fd").iterdir():
                if os.readlink(link) in sockets:
                    return agent
    return job.running[0] if job.running else None


# ---- what must change nothing ----------------------------------------------------------------


def _harmless(job: Job, kill: Kill) -> Death:
    agent = job.running[int(kill.pick * len(job.running))]
    everyone = False
    if kill.victim in _HELPERS:
        ranks = {worker["pid"] for worker in job.workers()}  # which have the zygote's words
        for pid in set(_children(agent)) - ranks:
            with suppress(OSError):
                if _HELPERS[kill.victim] in Path(f"/proc/{pid}/cmdline").read_bytes():
                    _kill(pid)
    else:
        pid = agent.process.pid
        if kill.victim == "worker stopped":
            workers = job.workers()
            pid = workers[int(kill.pick * len(workers))]["pid"]
        elif job.plan.agents > 1:
            everyone = agent is _coordinator(job) and kill.stop_s > LEASE_S
        _kill(pid, signal.SIGSTOP)
        time.sleep(kill.stop_s)
        _kill(pid, signal.SIGCONT)
    return Death(kill, time.monotonic(), set(), everyone=everyone)


def _children(agent: Agent) -> list[int]:
    with suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(agent.process.pid).children()]
    return []

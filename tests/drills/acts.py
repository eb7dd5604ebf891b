"""Carry out what is planned for a job: find who is meant, and kill, stop or ask.

Some are meant by what they do: a file with an order lies at a point of the program (`programs`),
and who comes there first takes it, and dies a moment later.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from drills.jobs import ASKED, GONE, Agent, Death, Job
from drills.plans import Kill

_POINTS = {
    "rank 0 during a commit": ("commit", 0.02),
    "worker during a commit": ("commit", 0.02),
    "worker during a restart": ("start", 1.0),
    "newcomer while it joins": ("join", 2.0),
    "newcomer while it gets the state": ("receive", 0.1),
    "survivor while it sends the state": ("send", 0.1),
    "survivor while all regroup": ("agree", 0.2),
}
"""Where who is meant comes by, and by how much his delay is shortened."""


def carry_out(job: Job, kill: Kill) -> Death:
    """Do to the job what `kill` says.

    Raises:
        Odd: Nobody has come to where somebody was to die.
    """
    if kill.harmless:
        return _harmless(job, kill)
    if "agent" in kill.victim:
        return _kill_agent(job, kill)
    if kill.victim in _POINTS:
        return _kill_at_point(job, kill)
    counts = {"two at once": (2, 0.0), "three in 50 ms": (3, 0.05 * kill.delay_s / 0.15 / 2)}
    count, apart_s = counts.get(kill.victim, (1, 0.0))
    death = _kill_ranks(job, kill, count, apart_s)
    if "zygote" in kill.victim:
        time.sleep(kill.delay_s / 5)
        _kill_helper(job, kill, _is_zygote)
    return death


def _kill(pid: int, number: int = signal.SIGKILL) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


# ---- ranks -----------------------------------------------------------------------------------


def _kill_ranks(job: Job, kill: Kill, count: int = 1, apart_s: float = 0.0) -> Death:
    workers = job.workers()
    if kill.victim == "rank 0":
        chosen = workers[:1]
    else:
        first = int(kill.pick * len(workers))
        chosen = (workers * 2)[first : first + min(count, len(workers))]
    at = time.monotonic()
    for number, worker in enumerate(chosen):
        time.sleep(apart_s if number else 0.0)
        _kill(worker["pid"])
    return Death(kill, at, [divmod(w["rank"], job.plan.nproc) for w in chosen])


def _kill_at_point(job: Job, kill: Kill) -> Death:
    """Leave an order at a point; kill somebody else first, if it takes that to come there."""
    point, share = _POINTS[kill.victim]
    delay_s = kill.delay_s * share
    before = sum(_POINTS.get(death.kill.victim, ("", 0))[0] == point for death in job.deaths)
    (job.folder / "orders" / point).write_text(str(delay_s))
    death = Death(kill, time.monotonic(), [(0, 0)])
    if point != "commit":
        death = _kill_ranks(job, kill)
    taken = job.folder / "taken"
    job.wait(
        lambda: len(list(taken.glob(f"{point}-*"))) > before or not job.running,
        f"nobody came to the point {point!r}",
    )
    death.at = time.monotonic() + delay_s
    return death


# ---- agents ----------------------------------------------------------------------------------


def _kill_agent(job: Job, kill: Kill) -> Death:
    """Kill an agent, or ask one to end; with it those whom the plan names."""
    agent = _choose_agent(job, kill)
    coordinator = len(job.agents) == 1 or agent is _coordinator(job, job.running)
    at = time.monotonic()
    if kill.victim == "agent asked to end":
        agent.asked = True
        agent.process.terminate()
        agent.process.wait()
        return Death(kill, at, [(agent.number, ASKED)], coordinator)
    agent.killed = True
    who = [(agent.number, GONE)]
    reaper = _helper(agent, _is_reaper) if "reaper" in kill.victim else None
    if reaper is not None:
        _kill(reaper)
    if "worker of another" in kill.victim:
        mine = _children(agent)
        others = [w for w in job.workers() if w["pid"] not in mine]
        for worker in others[: 1 if kill.pick < 0.9 else 2]:
            _kill(worker["pid"])
            who.insert(0, divmod(worker["rank"], job.plan.nproc))
        time.sleep(kill.delay_s / 3)
    agent.process.kill()
    agent.process.wait()
    return Death(kill, at, who, coordinator)


def _choose_agent(job: Job, kill: Kill) -> Agent:
    running = job.running
    coordinator = _coordinator(job, running)
    if kill.victim == "coordinator agent" and coordinator is not None:
        return coordinator
    if kill.victim != "agent asked to end":
        running = [a for a in running if a is not coordinator] or running
    return running[int(kill.pick * len(running))]


def _coordinator(job: Job, running: list[Agent]) -> Agent | None:
    """Return the agent that listens at the endpoint, or else the first."""
    port = f"0100007F:{job.port:04X}"
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    inodes = {f[9] for line in lines if (f := line.split())[1] == port and f[3] == "0A"}
    for agent in running:
        with suppress(OSError):
            for link in Path(f"/proc/{agent.process.pid}/fd").iterdir():
                if any(f"socket:[{inode}]" == os.readlink(link) for inode in inodes):
                    return agent
    return running[0] if running else None


# ---- what must change nothing ----------------------------------------------------------------


def _harmless(job: Job, kill: Kill) -> Death:
    if kill.victim in ("reaper", "zygote"):
        _kill_helper(job, kill, _is_reaper if kill.victim == "reaper" else _is_zygote)
    else:
        pids = [agent.process.pid for agent in job.running]
        if kill.victim == "worker stopped":
            pids = [worker["pid"] for worker in job.workers()]
        pid = pids[int(kill.pick * len(pids))]
        _kill(pid, signal.SIGSTOP)
        time.sleep(kill.stop_s)
        _kill(pid, signal.SIGCONT)
    return Death(kill, time.monotonic(), [])


def _kill_helper(job: Job, kill: Kill, is_it: Callable[[int], bool]) -> None:
    """Kill what helps one of the agents, if it still has such a helper."""
    running = job.running
    helper = _helper(running[int(kill.pick * len(running))], is_it) if running else None
    if helper is not None:
        _kill(helper)


def _helper(agent: Agent, is_it: Callable[[int], bool]) -> int | None:
    return next((pid for pid in _children(agent) if is_it(pid)), None)


def _children(agent: Agent) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{agent.process.pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, task.read_text().split())
    return found


def _is_reaper(pid: int) -> bool:
    return b"reaper.py" in _read(pid, "cmdline")


def _is_zygote(pid: int) -> bool:
    """A rank that was forked from it has its words, but a rank's variables."""
    return b"forking.py" in _read(pid, "cmdline") and b"DURE_ROOM=" in _read(pid, "environ")


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""

"""Start a job of a drill, let it live through what is planned (`acts`), bring it to its end, and
look whether that is as it must be.

Before each kill the job has made progress since the last one: every living agent's ranks have
committed a step. So each kill meets a job that is whole, and costs it one restart, unless two of
them happen at once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drills.plans import ASKED, GONE, LEASE_S, SAMPLES, Death, Kill, Plan
from dure.launch.ranks.ports import reserve_port
from tests.launch.procs.launching import Launching
from tests.waiting import key_file, until

PROGRAMS = Path(__file__).with_name("programs.py")
SHARED = Path("/dev/shm")
STACKS_S = 2.0


class Odd(AssertionError):
    """A job did what it must not."""


@dataclass
class Agent:
    """One `dure run`, which plays a host; `due` is its own exit code, if that is not the job's."""

    process: subprocess.Popen[str]
    number: int
    due: int | None = None


class Job:
    """One job, in a folder of its own.

    Attributes:
        plan: What is to happen.
        folder: Where its processes write.
        agents: In the order they were started.
        deaths: What has happened.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        self.agents: list[Agent] = []
        self.deaths: list[Death] = []
        for name in ("said", "orders", "taken", "commits", "parts", "tmp", "agents"):
            (self.folder / name).mkdir(parents=True)
        self._jobs = Launching(self.folder / "tmp")
        self._key = key_file(self.folder / "key")
        self._keeper, self.port = reserve_port()
        self._shared = shared_memory()
        self._read: dict[str, int] = {}
        self._said: list[dict[str, Any]] = []

    # ---- the agents --------------------------------------------------------------------------

    def start_agent(self) -> None:
        """Start another agent."""
        plan, number = self.plan, len(self.agents)
        words = ["--nproc", str(plan.nproc), "--key-file", str(self._key)]
        if plan.max_restarts:
            words += ["--max-restarts", str(plan.max_restarts), "--restart-delay", "0"]
        if plan.kind == "elastic":
            # What the first optimizer of a process imports, for a second: once, not in each rank.
            words += ["--elastic", "--min-ranks", "1", "--preload", "torch._dynamo"]
        if not any(kill.victim == "zygote" for kill in plan.kills):  # which has torch to import
            words += ["--no-zygote"] if plan.kind == "rounds" else []
        if plan.agents > 1:
            words += ["--nnodes", f"{plan.min_agents}:{plan.agents}"]
            words += ["--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-id", "drill"]
            words += ["--rdzv-conf", f"join_timeout=10,last_call_timeout=5,lease={LEASE_S}"]
        process = self._jobs.start(
            *words,
            PROGRAMS,
            plan.kind,
            self.folder,
            env={"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", "DURE_SILENCE": "4"},
            output=self.folder / "agents" / f"{number}.log",
        )
        self.agents.append(Agent(process, number))

    @property
    def running(self) -> list[Agent]:
        """The agents that have not ended."""
        return [agent for agent in self.agents if agent.process.poll() is None]

    def left(self) -> list[int]:
        """Return the processes of this job."""
        return self._jobs.left()

    # ---- what ranks say ----------------------------------------------------------------------

    def said(self) -> list[dict[str, Any]]:
        """Return all that was written down, as far as lines are whole; in no order."""
        for path in (self.folder / "said").iterdir():
            begin = self._read.get(path.name, 0)
            with path.open("rb") as file:
                file.seek(begin)
                text = file.read()
            whole = text.rfind(b"\n") + 1
            self._read[path.name] = begin + whole
            self._said += [json.loads(line) for line in text[:whole].splitlines()]
        return self._said

    def workers(self) -> list[dict[str, Any]]:
        """Return what the living ranks said last when they began, in the order of their ranks."""
        begun: dict[int, dict[str, Any]] = {}
        for entry in self.said():
            if entry["word"] == "begin":
                begun[entry["pid"]] = {**entry, "rank": entry.get("new_rank", entry["rank"])}
        mine = set(self.left())
        return sorted((e for p, e in begun.items() if p in mine), key=lambda e: e["rank"])

    def committed_after(self, at: float) -> float | None:
        """Return when a step was first committed that was begun after `at`, or None."""
        steps: dict[int, list[float]] = {}
        for entry in self.said():
            if entry["word"] == "committed" and entry["at"] > at:
                steps.setdefault(entry["pid"], []).append(entry["at"])
        second = [sorted(times)[1] for times in steps.values() if len(times) > 1]
        return min(second, default=None)

    def wait(self, done: Callable[[], object], what: str) -> Any:
        """Return what `done` returns once that is true."""
        try:
            return until(done, what)
        except AssertionError as error:
            raise Odd(str(error)) from None

    # ---- its life ------------------------------------------------------------------------------

    def run(self, carry_out: Callable[[Job, Kill], Death]) -> None:
        """Live through the whole plan; `carry_out` kills."""
        for _ in range(self.plan.agents):
            self.start_agent()
        begun = time.monotonic()
        for kill in self.plan.kills:
            if not self._recovers(begun):
                break
            time.sleep(kill.delay_s)
            death = carry_out(self, kill)
            self.deaths.append(death)
            begun = death.at
            replaced = self.plan.kind == "rounds" and death.who & {GONE, ASKED}
            if replaced and self.plan.exit_code(self.deaths) is None:
                self.start_agent()
        if self._recovers(begun):
            (self.folder / "enough").touch()
        for agent in self.agents:
            self.wait(
                lambda a=agent: a.process.poll() is not None, f"the end of agent {agent.number}"
            )
        self.wait(lambda: not self.left(), "the end of all processes")

    def _recovers(self, begun: float) -> bool:
        """Wait until all ranks have worked after `begun`; False if the job has ended instead."""
        self.wait(lambda: self._whole(begun) or not self.running, "a whole job")
        at = self.committed_after(begun)
        if self.deaths and at is not None:
            self.deaths[-1].recovery_s = at - begun
        return bool(self.running)

    def _whole(self, begun: float) -> bool:
        """Whether as many ranks as the job is to have have committed since `begun`."""
        wanted = self.plan.nproc * max(1, len(self.running))
        steps: dict[int, int] = {}
        for entry in self.said():
            if entry["word"] == "committed" and entry["at"] > begun:
                steps[entry["pid"]] = steps.get(entry["pid"], 0) + 1
        harmless = bool(self.deaths) and self.deaths[-1].kill.harmless
        anew = self.plan.kind == "rounds" and not harmless  # every kill begins a round
        mine = {e["pid"] for e in self.workers() if e["at"] > begun or not anew}
        return sum(count > 1 for pid, count in steps.items() if pid in mine) >= wanted

    def close(self) -> None:
        """End whatever is left; first let Python processes write their stacks into the logs."""
        agents = {agent.process.pid for agent in self.agents}
        for some in (set(self.left()) - agents, set(self.left()) & agents):
            for pid in some:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGABRT)
            if some:
                time.sleep(STACKS_S)
        self._jobs.kill()
        self._keeper.close()

    # ---- how it has ended ----------------------------------------------------------------------

    def check(self) -> None:
        """Check that all is as it must be of a job that has ended.

        Raises:
            Odd: The first thing that is not.
        """
        wanted = self.plan.exit_code(self.deaths) or 0
        for agent in self.agents:
            code = agent.process.returncode
            due = wanted if agent.due is None else agent.due
            if code != due:
                raise Odd(f"agent {agent.number} ended with {code}, and {due} was foretold")
        names = [path.name for path in (self.folder / "tmp").iterdir()]
        files = [name for name in names if not name.startswith("torchinductor_")]
        reaper = any(death.kill.victim == "reaper" for death in self.deaths)
        killed = any(agent.due == -signal.SIGKILL for agent in self.agents)
        if files and not (reaper and killed):  # a launcher may have had no reaper any more
            raise Odd(f"files are left: {sorted(files)}")
        new = shared_memory() - self._shared
        if mine := new - mapped(new):
            raise Odd(f"shared memory is left: {sorted(mine)}")
        if self.plan.kind == "rounds":
            self._check_commits(well=wanted == 0)
        else:
            self._check_seen(well=wanted == 0)
        self._check_no_commit_is_lost()

    def _check_commits(self, *, well: bool) -> None:
        """Check that each step was committed once, by one whole round, and rounds in order."""
        paths = sorted((self.folder / "commits").glob("[0-9]*"))
        commits = [json.loads(path.read_text()) for path in paths]
        if [int(path.name) for path in paths] != list(range(len(paths))):
            raise Odd(f"a commit is missing: {[path.name for path in paths]}")
        rounds = [commit["round"] for commit in commits]
        if rounds != sorted(rounds):
            raise Odd(f"an older round has committed after a newer one: {rounds}")
        for step, commit in enumerate(commits):
            if sorted(commit["samples"]) != list(range(SAMPLES)):
                raise Odd(f"step {step} has the wrong samples: {commit}")
        if [commit["last"] for commit in commits].count(True) != well:
            raise Odd("the last commit is missing, or not the last")

    def _check_seen(self, *, well: bool) -> None:
        """Check that the state of every rank that came to the end has each sample once."""
        ends = [entry["seen"] for entry in self.said() if entry["word"] == "seen"]
        if not ends and well:
            raise Odd("no rank came to the end")
        for seen in ends:
            if seen != [[step, [1.0] * SAMPLES] for step in range(len(seen))]:
                raise Odd("a sample was not seen exactly once")
        pids = {entry["pid"] for entry in self.said() if entry["word"] == "begin"}
        again = sum(death.kill.victim == "agent stopped" for death in self.deaths)  # and came back
        killed = sum(death.kill.deaths for death in self.deaths)
        most = self.plan.nproc * (self.plan.agents + again) + killed
        if len(pids) > most:
            raise Odd(f"{len(pids)} processes have trained, though {most} would have done")

    def _check_no_commit_is_lost(self) -> None:
        """Check that a rank that begins after a commit was seen begins no earlier than that.

        Where all ranks were lost, an elastic job has nothing to go on from: it begins anew, once.
        """
        steps = 0
        losses = [death.at for death in self.deaths if death.everyone]
        for entry in sorted(self.said(), key=lambda entry: entry["at"]):
            if entry["word"] == "committed":
                steps = max(steps, entry["step"])
            elif entry["word"] != "begin":
                continue
            elif entry["step"] == 0 and losses and losses[0] < entry["at"]:
                losses.pop(0)
                steps = 0
            elif entry["step"] < steps:
                raise Odd(f"a rank has begun at step {entry['step']}, and {steps} were committed")


def shared_memory() -> set[str]:
    """Return the names of shared memory that may be Dure's."""
    return {name for name in os.listdir(SHARED) if "dure" in name}


def mapped(names: set[str]) -> set[str]:
    """Return which shared memory some living process has mapped: another job's."""
    found: set[str] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            maps = (folder / "maps").read_text()
            found |= {name for name in names if name in maps}
    return found

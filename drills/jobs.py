"""Start a job of a drill, carry out its plan (`acts`), end it, and check its outcome.

Before each kill the job has made progress since the last one: the ranks of every live agent have
committed a step. So each kill costs a complete job one restart, unless two kills happen at once.
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
    """The outcome of a job is not the expected one."""


@dataclass
class Agent:
    """One `dure run`, as one host; `due` is its expected exit code if it differs from the job's."""

    process: subprocess.Popen[str]
    number: int
    due: int | None = None


class Job:
    """One job, in a separate folder.

    Attributes:
        plan: The plan of the job.
        folder: The folder to which its processes write.
        agents: Its agents in the order of their start.
        deaths: The deaths so far.
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
            # The first optimizer imports torch._dynamo for a second: once instead of in each rank.
            words += ["--elastic", "--min-ranks", "1", "--preload", "torch._dynamo"]
        if not any(kill.victim == "zygote" for kill in plan.kills):  # the zygote imports torch
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
        """Return all entries of the ranks' files that have complete lines, in no order."""
        for path in (self.folder / "said").iterdir():
            begin = self._read.get(path.name, 0)
            with path.open("rb") as file:
                file.seek(begin)
                text = file.read()
            complete = text.rfind(b"\n") + 1
            self._read[path.name] = begin + complete
            self._said += [json.loads(line) for line in text[:complete].splitlines()]
        return self._said

    def workers(self) -> list[dict[str, Any]]:
        """Return the last "begin" entry of each live rank, in the order of the ranks."""
        begun: dict[int, dict[str, Any]] = {}
        for entry in self.said():
            if entry["word"] == "begin":
                begun[entry["pid"]] = {**entry, "rank": entry.get("new_rank", entry["rank"])}
        mine = set(self.left())
        return sorted((e for p, e in begun.items() if p in mine), key=lambda e: e["rank"])

    def committed_after(self, at: float) -> float | None:
        """Return the time of the first commit of a step that began after `at`, or None."""
        steps: dict[int, list[float]] = {}
        for entry in self.said():
            if entry["word"] == "committed" and entry["at"] > at:
                steps.setdefault(entry["pid"], []).append(entry["at"])
        second = [sorted(times)[1] for times in steps.values() if len(times) > 1]
        return min(second, default=None)

    def wait(self, done: Callable[[], object], what: str) -> Any:
        """Wait until `done` returns a true value, and return it."""
        try:
            return until(done, what)
        except AssertionError as error:
            raise Odd(str(error)) from None

    # ---- run -----------------------------------------------------------------------------------

    def run(self, carry_out: Callable[[Job, Kill], Death]) -> None:
        """Carry out the complete plan; `carry_out` kills."""
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
        """Wait until all ranks have committed after `begun`; False if the job has ended instead."""
        self.wait(lambda: self._complete(begun) or not self.running, "progress of all ranks")
        at = self.committed_after(begun)
        if self.deaths and at is not None:
            self.deaths[-1].recovery_s = at - begun
        return bool(self.running)

    def _complete(self, begun: float) -> bool:
        """Return whether all ranks that the job must have, have committed since `begun`."""
        wanted = self.plan.nproc * max(1, len(self.running))
        steps: dict[int, int] = {}
        for entry in self.said():
            if entry["word"] == "committed" and entry["at"] > begun:
                steps[entry["pid"]] = steps.get(entry["pid"], 0) + 1
        harmless = bool(self.deaths) and self.deaths[-1].kill.harmless
        is_new = self.plan.kind == "rounds" and not harmless  # every kill starts a round
        mine = {e["pid"] for e in self.workers() if e["at"] > begun or not is_new}
        return sum(count > 1 for pid, count in steps.items() if pid in mine) >= wanted

    def close(self) -> None:
        """End all remaining processes, after Python processes have written their stacks."""
        agents = {agent.process.pid for agent in self.agents}
        for some in (set(self.left()) - agents, set(self.left()) & agents):
            for pid in some:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGABRT)
            if some:
                time.sleep(STACKS_S)
        self._jobs.kill()
        self._keeper.close()

    # ---- outcome -------------------------------------------------------------------------------

    def check(self) -> None:
        """Check the outcome of a job that has ended.

        Raises:
            Odd: The first unexpected fact.
        """
        wanted = self.plan.exit_code(self.deaths) or 0
        for agent in self.agents:
            code = agent.process.returncode
            due = wanted if agent.due is None else agent.due
            if code != due:
                raise Odd(f"agent {agent.number} ended with {code}, expected {due}")
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
        """Check that each step was committed once, by all ranks of a round, and rounds in order."""
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
        """Check that the state of every rank that finished has each sample once."""
        ends = [entry["seen"] for entry in self.said() if entry["word"] == "seen"]
        if not ends and well:
            raise Odd("no rank has finished")
        for seen in ends:
            if seen != [[step, [1.0] * SAMPLES] for step in range(len(seen))]:
                raise Odd("a sample was not seen exactly once")
        pids = {entry["pid"] for entry in self.said() if entry["word"] == "begin"}
        again = sum(death.kill.victim == "agent stopped" for death in self.deaths)  # and came back
        killed = sum(death.kill.deaths for death in self.deaths)
        most = self.plan.nproc * (self.plan.agents + again) + killed
        if len(pids) > most:
            raise Odd(f"{len(pids)} processes have trained, expected at most {most}")

    def _check_no_commit_is_lost(self) -> None:
        """Check that a rank that starts after a commit starts with that step or a later one.

        If all ranks were lost, an elastic job has lost its state and starts at step 0, once.
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
    """Return the names that a live process has mapped; these belong to other jobs."""
    found: set[str] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            maps = (folder / "maps").read_text()
            found |= {name for name in names if name in maps}
    return found

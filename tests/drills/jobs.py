"""Start a job of a drill, let it live through what is planned (`acts`), and bring it to its end.

Before each kill the job has made progress since the last one: every living agent's ranks have
committed a step. So each kill meets a job that is whole, and costs it one restart, unless two of
them happen at once.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drills.plans import AFTER_ANOTHER, Kill, Plan
from procs.launching import DURE, living

PROGRAMS = Path(__file__).with_name("programs.py")
LIMIT_S = 180.0
LOOK_S = 0.01
STACKS_S = 2.0


GONE, ASKED = -1, -2
"""In place of a local rank: the agent itself died, or was asked to end."""


class Odd(AssertionError):
    """A job did what it must not."""


@dataclass
class Death:
    """A kill that was carried out.

    Attributes:
        kill: As planned.
        at: When.
        who: Agents and local ranks who died; or `GONE` or `ASKED` of an agent itself.
        coordinator: Whether it was the agent on whom all others depend.
        recovery_s: From then to the next commit, or to the end of all where the job must end.
    """

    kill: Kill
    at: float
    who: list[tuple[int, int]]
    coordinator: bool = False
    recovery_s: float = float("nan")

    @property
    def times(self) -> int:
        """How often it happened, one after the other."""
        return 2 if self.kill.victim in AFTER_ANOTHER else 1

    @property
    def returns(self) -> bool:
        """Whether an agent is gone."""
        return any(local in (GONE, ASKED) for _, local in self.who)


@dataclass
class Agent:
    """One `dure run`, which plays a host."""

    process: subprocess.Popen[bytes]
    log: Path
    number: int
    killed: bool = False
    asked: bool = False


@dataclass
class Job:
    """One job, in a folder of its own.

    Attributes:
        plan: What is to happen.
        folder: Where its processes write.
        agents: In the order they were started.
        deaths: What has happened.
    """

    plan: Plan
    folder: Path
    agents: list[Agent] = field(default_factory=list[Agent])
    deaths: list[Death] = field(default_factory=list[Death])

    def __post_init__(self) -> None:
        self.tag = f"DURE_DRILL={uuid.uuid4().hex}"
        for name in ("said", "orders", "taken", "commits", "parts", "tmp", "agents"):
            (self.folder / name).mkdir(parents=True)
        self.key = self.folder / "key"
        self.key.write_bytes(secrets.token_bytes(32))
        self.key.chmod(0o600)
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self._read: dict[str, int] = {}
        self._said: list[dict[str, Any]] = []

    # ---- the agents --------------------------------------------------------------------------

    def start(self) -> None:
        """Start all agents."""
        for _ in range(self.plan.agents):
            self.start_agent()

    def start_agent(self) -> None:
        """Start another agent."""
        plan, number = self.plan, len(self.agents)
        words = ["--nproc", str(plan.nproc), "--key-file", str(self.key)]
        if not plan.zygote:
            words += ["--no-zygote"]
        if plan.max_restarts:
            words += ["--max-restarts", str(plan.max_restarts)]
        if plan.kind == "elastic":
            words += ["--elastic", "--min-ranks", "1"]
        if plan.agents > 1:
            words += ["--nnodes", f"{plan.min_agents}:{plan.agents}"]
            words += ["--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-id", "drill"]
            words += ["--rdzv-conf", "join_timeout=10,last_call_timeout=5"]
        name, _, value = self.tag.partition("=")
        # A host's own number keeps apart what the agents of one machine say.
        variables = {name: value, "TMPDIR": str(self.folder / "tmp"), "DRILL_AGENT": str(number)}
        log = self.folder / "agents" / f"{number}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*DURE, "run", *words, str(PROGRAMS), plan.kind, str(self.folder)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=os.environ | variables | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
            )
        self.agents.append(Agent(process, log, number))

    @property
    def running(self) -> list[Agent]:
        """The agents that have not ended."""
        return [agent for agent in self.agents if agent.process.poll() is None]

    def left(self) -> list[int]:
        """Return the processes of this job."""
        return living(self.tag)

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

    def wait(self, done: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> Any:
        """Return what `done` returns once that is true."""
        deadline = time.monotonic() + limit_s
        while not (found := done()):
            if time.monotonic() > deadline:
                raise Odd(f"waited for {limit_s:g} s: {what}")
            time.sleep(LOOK_S)
        return found

    # ---- its life ------------------------------------------------------------------------------

    def run(
        self,
        carry_out: Callable[[Job, Kill], Death],
        goes_on: Callable[[list[Death]], bool],
    ) -> None:
        """Live through the whole plan.

        Args:
            carry_out: Kills.
            goes_on: Whether a job to which this has happened goes on.
        """
        self.start()
        begun = time.monotonic()
        for kill in self.plan.kills:
            if not self._recovers(begun):
                break
            time.sleep(kill.delay_s)
            death = carry_out(self, kill)
            self.deaths.append(death)
            begun = death.at
            if death.returns and self.plan.returns and goes_on(self.deaths):
                self.start_agent()
        if self.plan.kind != "plain" and self._recovers(begun):
            (self.folder / "enough").touch()
        self._see_the_end(begun)

    def _recovers(self, begun: float) -> bool:
        """Wait until all ranks have worked after `begun`; False if the job has ended instead."""
        self.wait(lambda: self._whole(begun) or self._over(), "the job is not whole again")
        at = self.committed_after(begun)
        if self.deaths and at is not None:
            self.deaths[-1].recovery_s = at - begun
        return not self._over()

    def _over(self) -> bool:
        """Whether all agents have ended."""
        return not self.running

    def _whole(self, begun: float) -> bool:
        """Whether as many ranks as the job is to have have committed since `begun`."""
        wanted = self._wanted()
        steps: dict[int, int] = {}
        for entry in self.said():
            if entry["word"] == "committed" and entry["at"] > begun:
                steps[entry["pid"]] = steps.get(entry["pid"], 0) + 1
        harmless = bool(self.deaths) and self.deaths[-1].kill.harmless
        anew = self.plan.kind == "rounds" and not harmless  # every kill begins a round
        mine = {e["pid"] for e in self.workers() if e["at"] > begun or not anew}
        return sum(count > 1 for pid, count in steps.items() if pid in mine) >= wanted

    def _wanted(self) -> int:
        here = len(self.running)
        return self.plan.nproc * max(1, here)

    # ---- the end -----------------------------------------------------------------------------

    def _see_the_end(self, begun: float) -> None:
        """Wait until everything of the job has ended."""
        for agent in self.agents:
            self.wait(lambda a=agent: a.process.poll() is not None, f"agent {agent.number} ends")
        self.wait(lambda: not self.left(), "processes are left", 10)
        if self.plan.kind == "plain" and self.deaths:
            self.deaths[-1].recovery_s = time.monotonic() - begun

    def close(self) -> None:
        """End whatever is left; first let Python processes write their stacks into the logs."""
        agents = {agent.process.pid for agent in self.agents}
        for some in (set(self.left()) - agents, set(self.left()) & agents):
            for pid in some:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGABRT)
            if some:
                time.sleep(STACKS_S)
        for agent in self.agents:
            agent.process.kill()
            agent.process.wait()
        for pid in self.left():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

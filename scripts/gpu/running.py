"""Runs checks, each in a process of its own, and prints the table."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

import dure as dist
from gpu.checks import LIMIT_S, Check, outcome, told


def in_child(one: Check, out: Connection, log: str) -> None:
    """Run a check in a forked process and send its result."""
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)
    try:
        said = one.run()
        out.send(("ok", "" if said is None else str(said)))
    except BaseException as error:
        traceback.print_exc()
        out.send((outcome(error, one.may_refuse), told(error)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@dataclass
class Running:
    """A check whose process was started."""

    check: Check
    process: Any
    pipe: Connection
    began: float
    log: str

    def result(self) -> tuple[str, str] | None:
        """Return its result if there is one; the process is ended then."""
        found: tuple[str, str] | None = None
        if self.pipe.poll():
            try:
                found = self.pipe.recv()
            except EOFError:
                self.process.join(2)
                found = ("died", f"exit status {self.process.exitcode}; {self.last_line()}")
        elif time.monotonic() - self.began > LIMIT_S:
            found = ("limit", f"no result after {LIMIT_S:.0f} s")
        if found is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()  # it may not have made its process group yet
            self.process.join()
        return found

    def last_line(self) -> str:
        """Return the last line that it printed."""
        lines = Path(self.log).read_text(errors="replace").split("\n")
        return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "")


def run_all(checks: list[Check], jobs: int, logs: Path) -> dict[str, int]:
    """Run checks, some at a time, and print a line for each; return how many had which result."""
    # Forked from here: torch is imported once, and CUDA is not touched in this process.
    context = multiprocessing.get_context("fork")
    waiting, running = list(enumerate(checks)), list[Running]()
    counts: dict[str, int] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            number, one = waiting[0]
            if running and (one.alone or running[0].check.alone):
                break
            waiting.pop(0)
            here, there = context.Pipe(duplex=False)
            log = str(logs / f"{number}.log")
            process = context.Process(target=in_child, args=(one, there, log))
            process.start()
            there.close()
            running.append(Running(one, process, here, time.monotonic(), log))
        wait([r.pipe for r in running], 0.2)
        for each in list(running):
            found = each.result()
            if found is None:
                continue
            running.remove(each)
            result, said = found
            counts[result] = counts.get(result, 0) + 1
            seconds = time.monotonic() - each.began
            line = f"| {each.check.part} | {each.check.name} | {result} | {seconds:.1f} | {said} |"
            print(line, flush=True)
    return counts


def machine() -> str:
    """Describe card, driver and versions, without touching CUDA in this process."""
    question = "nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader"
    try:
        cards = subprocess.run(question.split(), capture_output=True, text=True, check=False).stdout
    except OSError:
        cards = ""
    card = "; ".join(cards.split("\n")).strip("; ") or "no card"
    nccl = getattr(torch._C, "_nccl_version", lambda: 0)()
    version = f"{nccl >> 32}.{nccl >> 16 & 0xFFFF}.{nccl & 0xFFFF}" if nccl else "none"
    return (
        f"{datetime.date.today()}, {card}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"NCCL {version}, Python {sys.version.split()[0]}, dure {dist.__version__}"
    )

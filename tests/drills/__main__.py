"""Run drills until so many processes were killed; print who, what came of it, and how soon."""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from drills import checks, foretold
from drills.acts import carry_out
from drills.jobs import Death, Job, Odd
from drills.plans import KINDS, Plan, draw_plan

MOST_ODD = 25
"""So many odd jobs are enough to look at."""


def run_job(plan: Plan, folder: Path) -> list[Death]:
    """Run one job in `folder`; return whom it has lost.

    Raises:
        Odd: It has not ended as it must.
    """
    shared = checks.shared_memory()
    job = Job(plan, folder)
    try:
        job.run(carry_out, lambda deaths: foretold.goes_on(plan, deaths))
        checks.check(job, shared)
    finally:
        job.close()
    return job.deaths


def table(deaths: Iterable[tuple[str, Death]], odd: dict[tuple[str, str], int]) -> str:
    """Return the table of kinds and victims."""
    lines = [
        "| job | victim | kills | odd | recovery: median | 95 % | longest |",
        "| --- | --- " + "| ---: " * 5 + "|",
    ]
    by: dict[tuple[str, str], list[Death]] = {}
    for kind, death in deaths:
        by.setdefault((kind, death.kill.victim), []).append(death)
    for (kind, victim), found in sorted(by.items(), key=lambda x: (KINDS.index(x[0][0]), x[0][1])):
        times = sorted(d.recovery_s for d in found if d.recovery_s == d.recovery_s)
        shown = ["", "", ""]
        if times:
            late = times[min(len(times) - 1, int(0.95 * len(times)))]
            shown = [f"{t:.2f} s" for t in (statistics.median(times), late, times[-1])]
        count = sum(death.kill.deaths for death in found)
        cells = (kind, victim, str(count), str(odd.get((kind, victim), 0)), *shown)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


@dataclass
class Tally:
    """What a drill has come to so far."""

    deaths: list[tuple[str, Death]] = field(default_factory=list[tuple[str, Death]])
    odd: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    num_jobs: int = 0
    num_odd: int = 0
    began: float = field(default_factory=time.monotonic)

    @property
    def num_kills(self) -> int:
        """How many processes were killed."""
        return sum(death.kill.deaths for _, death in self.deaths)

    def show(self) -> None:
        """Print the sums and the table."""
        took = time.monotonic() - self.began
        counts = f"{self.num_jobs} jobs, {self.num_kills} kills, {self.num_odd} odd"
        print(f"\n{counts}, {took:.0f} s\n\n{table(self.deaths, self.odd)}", flush=True)


def drill(options: argparse.Namespace) -> int:
    """Run jobs until enough processes were killed, or Ctrl-C; return how many jobs were odd."""
    tally = Tally()
    kinds, keep = tuple(options.kinds), options.keep
    try:
        while tally.num_kills < options.kills and tally.num_odd < MOST_ODD:
            plan = draw_plan(options.seed + tally.num_jobs, kinds, options.more)
            verdict = run_and_count(plan, keep, tally)
            print(f"{tally.num_kills:4d}  {verdict}", flush=True)
    finally:
        tally.show()
    return tally.num_odd


def run_and_count(plan: Plan, keep: Path, tally: Tally) -> str:
    """Run one job, add it to the tally, and return what is to be said of it."""
    tally.num_jobs += 1
    folder = Path(tempfile.mkdtemp(prefix=f"drill-{plan.seed}-"))
    said = f"seed {plan.seed}  {plan}"
    try:
        deaths = run_job(plan, folder)
    except Odd as problem:
        tally.num_odd += 1
        for key in {(plan.kind, kill.victim) for kill in plan.kills}:
            tally.odd[key] = tally.odd.get(key, 0) + 1
        keep.mkdir(parents=True, exist_ok=True)
        shutil.move(folder, keep / folder.name)
        return f"{said}: ODD: {problem} (kept: {keep / folder.name}; again: --seed {plan.seed})"
    shutil.rmtree(folder)
    tally.deaths += [(plan.kind, death) for death in deaths]
    times = ", ".join(f"{death.recovery_s:.2f}" for death in deaths)
    return f"{said}: as foretold (recovered after {times} s)"


def main() -> int:
    """Read the command line."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # be it started in the background
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parser = argparse.ArgumentParser(prog="python -m drills", description=__doc__)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--keep", type=Path, default=Path("runs/drill"), help="where odd jobs go")
    parser.add_argument("--more", type=int, default=1, help="so many times as many kills a job")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    return min(1, drill(options))


if __name__ == "__main__":
    sys.exit(main())

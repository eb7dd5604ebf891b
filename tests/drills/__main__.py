"""Run drills until so many processes were killed; print who, what came of it, and how soon."""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from drills import checks, foretold
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
        job.run(lambda deaths: foretold.goes_on(plan, deaths))
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


def drill(kills: int, seed: int, kinds: tuple[str, ...], keep: Path) -> int:
    """Run jobs until `kills` processes were killed; return how many jobs were odd."""
    deaths: list[tuple[str, Death]] = []
    odd: dict[tuple[str, str], int] = {}
    num_jobs, num_odd, num_kills = 0, 0, 0
    began = time.monotonic()
    while num_kills < kills and num_odd < MOST_ODD:
        plan = draw_plan(seed + num_jobs, kinds)
        num_jobs += 1
        folder = Path(tempfile.mkdtemp(prefix=f"drill-{plan.seed}-"))
        job_deaths: list[Death] = []
        try:
            job_deaths = run_job(plan, folder)
            verdict = "as foretold"
            shutil.rmtree(folder)
        except Odd as problem:
            num_odd += 1
            keep.mkdir(parents=True, exist_ok=True)
            kept = keep / folder.name
            shutil.move(folder, kept)
            verdict = f"ODD: {problem} (kept: {kept}; again: --seed {plan.seed} --kills 1)"
            odd |= {
                (plan.kind, k.victim): odd.get((plan.kind, k.victim), 0) + 1 for k in plan.kills
            }
        deaths += [(plan.kind, death) for death in job_deaths]
        num_kills += sum(death.kill.deaths for death in job_deaths)
        print(f"{num_kills:4d}  seed {plan.seed}  {plan}: {verdict}", flush=True)
    took = time.monotonic() - began
    print(f"\n{num_jobs} jobs, {num_kills} kills, {num_odd} odd, {took:.0f} s\n")
    print(table(deaths, odd))
    return num_odd


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m drills", description=__doc__)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--keep", type=Path, default=Path("runs/drill"), help="where odd jobs go")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    return min(1, drill(options.kills, options.seed, tuple(options.kinds), options.keep))


if __name__ == "__main__":
    sys.exit(main())

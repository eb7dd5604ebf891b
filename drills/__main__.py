"""Run drills until a number of processes were killed; print a table of outcomes and times."""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from drills.acts import carry_out
from drills.jobs import Job, Odd
from drills.plans import Death, Plan, draw_plan
from drills.stops import end_many

MOST_ODD = 25
"""The drill stops after so many jobs with an unexpected outcome."""

KEEP = Path("runs/drill")
"""Where the folders of these jobs are kept."""

Victim = tuple[str, str]
"""The job's kind, and the kind of process that was killed."""


def run_job(plan: Plan, folder: Path) -> list[Death]:
    """Run one job in `folder`; return its deaths.

    Raises:
        Odd: The job did not end as it must.
    """
    job = Job(plan, folder)
    try:
        job.run(carry_out)
        job.check()
    finally:
        job.close()
    return job.deaths


def table(deaths: list[tuple[Victim, Death]], odd: Counter[Victim]) -> str:
    """Return the table by kind of job and victim."""
    lines = [
        "| job | victim | kills | odd | recovery: median | longest |",
        "| --- | --- " + "| ---: " * 4 + "|",
    ]
    for victim in sorted({victim for victim, _ in deaths}):
        found = [death for of, death in deaths if of == victim]
        times = [d.recovery_s for d in found if d.recovery_s == d.recovery_s]
        shown = [f"{statistics.median(times):.2f} s", f"{max(times):.2f} s"] if times else ["", ""]
        kills = sum(death.kill.deaths for death in found)
        lines.append("| " + " | ".join([*victim, str(kills), str(odd[victim]), *shown]) + " |")
    return "\n".join(lines)


def drill(wanted: int, seed: int) -> int:
    """Run jobs until enough processes were killed, or Ctrl-C; return how many jobs were odd."""
    deaths: list[tuple[Victim, Death]] = []
    odd: Counter[Victim] = Counter()
    num_jobs = num_odd = num_kills = 0
    began = time.monotonic()
    try:
        while num_kills < wanted and num_odd < MOST_ODD:
            plan = draw_plan(seed + num_jobs)
            num_jobs += 1
            folder = Path(tempfile.mkdtemp(prefix=f"drill-{plan.seed}-"))
            try:
                of_job = run_job(plan, folder)
            except Odd as problem:
                num_odd += 1
                odd.update({(plan.kind, kill.victim) for kill in plan.kills})
                KEEP.mkdir(parents=True, exist_ok=True)
                shutil.move(folder, KEEP / folder.name)
                verdict = f"ODD: {problem} (kept: {KEEP / folder.name})"
            else:
                shutil.rmtree(folder)
                deaths += [((plan.kind, death.kill.victim), death) for death in of_job]
                num_kills += sum(death.kill.deaths for death in of_job)
                times = ", ".join(f"{death.recovery_s:.2f}" for death in of_job)
                verdict = f"as expected (recovered after {times} s)"
            print(f"{num_kills:4d}  seed {plan.seed}  {plan}: {verdict}", flush=True)
    finally:
        took_s = time.monotonic() - began
        print(f"\n{num_jobs} jobs, {num_kills} kills, {num_odd} odd, {took_s:.0f} s\n")
        print(table(deaths, odd), flush=True)
    return num_odd


def main() -> int:
    """Read the command line."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background processes
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parser = argparse.ArgumentParser(prog="python -m drills", description=__doc__)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--stops", type=int, help="instead, end this many jobs as systemd does")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    if options.stops is not None:
        return min(1, end_many(options.stops, options.seed))
    return min(1, drill(options.kills, options.seed))


if __name__ == "__main__":
    sys.exit(main())

"""What a training step's memory is: resident size and fair share of each rank, at their peaks.

    python benchmarks/memory.py [--model NAME] [--steps N] [--json FILE]

*RSS* counts every page that a process has mapped, *PSS* divides pages that several processes have
mapped among them; the sum of the ranks' PSS is what the job really takes. Both are read from
`/proc/PID/smaps_rollup` of all ranks again and again while they make steps, and the largest values
are shown; RSS is also the kernel's own account of the peak. Contestants run one after the other,
while nothing else of Python runs: pages of the same libraries are shared with any other process.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compared.group import Contestant, Group, GroupFailed
from training import ALONE, CONTESTANTS, MODELS, RANK, RANKS

from dure.cli.machine import conditions

EVERY_S = 0.02


@dataclass(slots=True)
class Peaks:
    """The largest sizes seen of a job's processes, in bytes.

    Attributes:
        pss: Of each rank, by its process.
        all_pss: Of all ranks together, at one moment.
    """

    pss: dict[int, int] = field(default_factory=dict[int, int])
    all_pss: int = 0

    def look(self, processes: list[int]) -> None:
        """Read the sizes of `processes` once."""
        now = {process: fair_share(process) for process in processes}
        self.pss = {p: max(size, self.pss.get(p, 0)) for p, size in now.items()}
        self.all_pss = max(self.all_pss, sum(now.values()))


def fair_share(process: int) -> int:
    """Return a process' PSS in bytes."""
    for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def watched_steps(group: Group, count: int, peaks: Peaks) -> None:
    """Make `count` steps and look at the ranks' sizes meanwhile."""
    processes = [answer["process"] for answer in group.call("memory")]
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            peaks.look(processes)
            time.sleep(EVERY_S)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        group.call("steps", count=count)
    finally:
        ended.set()
        watcher.join()


def measure(name: str, model: str, steps: int) -> dict[str, Any]:
    """Run one contestant; return its figures."""
    kind, library = CONTESTANTS["none"] if name == ALONE else CONTESTANTS[name]
    contestant = Contestant(role=(kind, library, model), program=(RANK,))
    with Group(contestant, 1 if name == ALONE else RANKS) as group:
        group.accept_ranks()
        peaks = Peaks()
        watched_steps(group, steps, peaks)
        return {
            "contestant": name,
            "model": model,
            "rss_bytes": max(answer["rss"] for answer in group.call("memory")),
            "pss_bytes": max(peaks.pss.values()),
            "all_pss_bytes": peaks.all_pss,
        }


def show(rows: list[dict[str, Any]]) -> None:
    """Print a table; the last column is relative to so many single processes."""
    alone = rows[0]
    print("| | RSS a rank | | PSS a rank | | PSS of all | |")
    print("| --- " + "| ---: " * 6 + "|")
    for row in rows:
        ranks = 1 if row is alone else RANKS
        cells: list[str] = []
        for key, unit in (("rss_bytes", 1), ("pss_bytes", 1), ("all_pss_bytes", ranks)):
            base = alone[key] * unit
            cells += [f"{row[key] / 1e6:.0f} MB", f"{row[key] / base:.2f}x"]
        print(f"| {row['contestant']} | " + " | ".join(cells) + " |")


def main() -> None:
    """Measure every contestant."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="gpt50m")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in (ALONE, *CONTESTANTS):
        try:
            rows.append(measure(name, options.model, options.steps))
        except GroupFailed as failure:
            print(f"{name} is left out: {failure}")
    show(rows)
    if options.json:
        options.json.write_text(json.dumps({**conditions(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

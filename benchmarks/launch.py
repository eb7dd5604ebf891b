"""Launchers: how fast they start ranks, what idle ranks take, how fast a job ends, and recovers.

    python benchmarks/launch.py [--rounds N] [--ranks N]... [--only PART]... [--write]

Contestants are `torchrun` and `dure run`, with ranks forked from one process that has imported
torch, and (*fresh*) without. Where both have a thing, they take turns, round by round, so that what
else the machine does hits both alike; a first round, which fills caches, is thrown away. Figures
are medians, with the smallest and largest; all but memory are seconds.

- *start*: from the command to its end, for programs that do nothing, import torch, or also form a
  group, meet, and leave it.
- *memory*: of 4 ranks that have imported torch and sleep, and of all processes of the job: PSS
  divides a page among the processes that share it, RSS counts it for each that has it mapped.
- *tear-down*: from the last act of a rank that dies to the end of the command.
- *recovery*: from the last act of a rank that is killed: with restarted workers to the first line
  of the last of them; with `dure.elastic` to the next step that is committed on all survivors, and
  to the first that counts the replacement in.

Processes tell what happens when by files (`launch_programs.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dure.cli.machine import busy_cores, conditions

PROGRAMS = str(Path(__file__).with_name("launch_programs.py"))
DURE = (sys.executable, "-m", "dure.cli", "run")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
RESULTS = Path(__file__).with_name("results") / "launch.json"
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Launcher:
    """A contestant: its command, and the module that its ranks use as `torch.distributed`."""

    name: str
    words: tuple[str, ...]
    module: str


LAUNCHERS = (
    Launcher("torchrun", TORCHRUN, "torch.distributed"),
    Launcher("dure run", DURE, "dure"),
    Launcher("dure run, fresh", (*DURE, "--no-zygote"), "dure"),
)
ELASTIC = LAUNCHERS[1]


@dataclass(slots=True)
class Case:
    """One thing to measure, again and again.

    Attributes:
        part: start, memory, tear-down or recovery.
        launcher: Who.
        ranks: How many.
        what: What the ranks do.
        run: Does it once; returns figures by their names.
        figures: What came out, by name.
    """

    part: str
    launcher: str
    ranks: int
    what: str
    run: Callable[[], dict[str, float]]
    figures: dict[str, list[float]] = field(default_factory=dict[str, list[float]])


class Job:
    """One run of a launcher, and what its processes told.

    Args:
        launcher: Who starts the ranks.
        ranks: How many.
        what: What `launch_programs.py` does.
        options: Further words for the launcher.
    """

    def __init__(self, launcher: Launcher, ranks: int, what: str, *options: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.path = Path(self._folder.name)
        self.tag = uuid.uuid4().hex
        words = (*launcher.words, "--nproc-per-node", str(ranks), *options, PROGRAMS)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "LAUNCH_BENCHMARK": self.tag}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self.began = time.monotonic()
        self._process = subprocess.Popen(
            [*words, what, launcher.module, self._folder.name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            env=environment,
        )

    def finish(self, *codes: int) -> float:
        """Wait for the end; return when that was. Any of `codes` is well, or (none given) 0."""
        code = self._process.wait(LIMIT_S)
        ended = time.monotonic()
        if code not in (codes or (0,)):
            self._log.seek(0)
            raise RuntimeError(f"exit code {code}: {self._log.read().decode(errors='replace')}")
        return ended

    def close(self) -> None:
        """Remove the folder; end what still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._log.close()
        self._folder.cleanup()

    def times(self, word: str) -> dict[str, list[float]]:
        """Return when each process came to `word`."""
        found: dict[str, list[float]] = {}
        for name in sorted(os.listdir(self.path)):
            said, process, when = name.split("-")
            if said == word:
                found.setdefault(process, []).append(int(when) / 1e9)
        return found

    def last(self, word: str) -> float:
        """Return when the last process first came to `word`."""
        return max(min(times) for times in self.times(word).values())

    def await_marks(self, word: str, count: int) -> None:
        """Wait until `count` processes have come to `word`."""
        while len(self.times(word)) < count:
            if self._process.poll() is not None or time.monotonic() > self.began + LIMIT_S:
                self.finish(-1)
            time.sleep(0.05)

    def processes(self) -> list[Path]:
        """Return the folders in /proc of all that the launcher has started, and its own."""
        tag = f"LAUNCH_BENCHMARK={self.tag}".encode()
        found: list[Path] = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if tag in (folder / "environ").read_bytes():
                    found.append(folder)
            except OSError:
                continue
        return found

    def settled(self) -> list[Path]:
        """Return them once none has come or gone for a while."""
        before: list[Path] | None = None
        while before != (now := self.processes()):
            before = now
            time.sleep(0.5)
        return now


# ---- what is measured ----------------------------------------------------------------------------


def start(launcher: Launcher, ranks: int, what: str) -> dict[str, float]:
    """Measure from the command to its end."""
    job = Job(launcher, ranks, what)
    try:
        return {"all": job.finish() - job.began}
    finally:
        job.close()


def tear_down(launcher: Launcher, ranks: int, what: str) -> dict[str, float]:
    """Measure from a rank's death to the launcher's end."""
    job = Job(launcher, ranks, what)
    try:
        ended = job.finish(1, 137, 143, -9)
        return {"all": ended - job.last("dies")}
    finally:
        job.close()


def memory(launcher: Launcher, ranks: int, what: str) -> dict[str, float]:
    """Measure what idle ranks take, in MB: the ranks, and all processes of the job."""
    job = Job(launcher, ranks, what)
    try:
        job.await_marks("ready", ranks)
        mine = job.times("ready")
        figures: dict[str, float] = {}
        for folder in job.settled():
            for kind, size in _sizes(folder).items():
                owners = ("ranks", "job") if folder.name in mine else ("job",)
                for owner in owners:
                    figures[f"{kind} of {owner}"] = figures.get(f"{kind} of {owner}", 0) + size
        (job.path / "enough-0-0").touch()
        job.finish()
        return figures
    finally:
        job.close()


def _sizes(folder: Path) -> dict[str, float]:
    """Return a process' PSS and RSS in MB."""
    lines = (folder / "smaps_rollup").read_text().splitlines()
    fields = dict(line.split()[:2] for line in lines[1:])
    wanted = {"PSS": "Pss:", "RSS": "Rss:"}
    return {name: int(fields[field]) * 1024 / 1e6 for name, field in wanted.items()}


def restart(launcher: Launcher, ranks: int, what: str) -> dict[str, float]:
    """Measure from a rank's death to the first line of the last rank in the next round."""
    job = Job(launcher, ranks, what, "--max-restarts", "1")
    try:
        job.finish()
        return {"first line": job.last("line") - job.last("dies")}
    finally:
        job.close()


def survive(launcher: Launcher, ranks: int, what: str) -> dict[str, float]:
    """Measure from a rank's death to the survivors' next committed step."""
    job = Job(launcher, ranks, what, "--elastic", "--max-restarts", "1")
    try:
        job.finish()
        died = job.last("dies")
        joined = job.last("joined")
        after = [min(t for t in times if t > joined) for times in job.times("step").values()]
        return {
            "next step of all survivors": job.last("step") - died,
            "next step with the replacement": max(after) - died,
        }
    finally:
        job.close()


# ---- all of it -----------------------------------------------------------------------------------

DEATHS = tuple(
    f"dies:{how}:{where}" for how in ("SIGKILL", "exit") for where in ("sleep", "collective")
)
PARTS = ("start", "memory", "tear-down", "recovery")


def cases(parts: list[str], ranks: list[int]) -> list[Case]:
    """List what there is to measure, the contestants of each thing side by side."""
    things: list[tuple[str, int, str, Callable[[Launcher, int, str], dict[str, float]]]] = []
    for n in ranks:
        things += [("start", n, what, start) for what in ("nothing", "imports", "initialises")]
        things += [("tear-down", n, what, tear_down) for what in DEATHS]
    things.append(("memory", max(ranks), "idles", memory))
    things.append(("recovery", max(ranks), "restarts", restart))
    found = [
        Case(part, who.name, n, what, lambda f=function, w=who, n=n, x=what: f(w, n, x))
        for part, n, what, function in things
        for who in (LAUNCHERS if part != "tear-down" else LAUNCHERS[:2])
    ]
    n = max(ranks)
    found.append(
        Case("recovery", ELASTIC.name, n, "survives", lambda: survive(ELASTIC, n, "survives"))
    )
    return [case for case in found if case.part in parts]


def measure(wanted: list[Case], rounds: int) -> None:
    """Run every case once for the caches, and then `rounds` times in turn; memory once."""
    for number in range(rounds + 1):
        for case in wanted:
            if case.part == "memory" and number > 1:
                continue
            figures = case.run()
            for name, value in figures.items() if number else ():
                case.figures.setdefault(name, []).append(value)
        print(f"round {number} of {rounds} is done", file=sys.stderr, flush=True)


def tables(wanted: list[Case]) -> str:
    """Return a table for each part."""
    lines: list[str] = []
    for part in dict.fromkeys(case.part for case in wanted):
        lines += [f"**{part}** ({'MB' if part == 'memory' else 's'})", ""]
        lines += ["| ranks | what | | torchrun | dure run | ratio | fresh |"]
        lines += ["| ---: | --- | --- " + "| ---: " * 4 + "|"]
        rows: dict[tuple[int, str, str], dict[str, list[float]]] = {}
        for case in wanted:
            for name, values in case.figures.items() if case.part == part else ():
                rows.setdefault((case.ranks, case.what, name), {})[case.launcher] = values
        for (ranks, what, name), by in rows.items():
            torchrun, dure, fresh = (by.get(launcher.name) for launcher in LAUNCHERS)
            ratio = ""
            if torchrun and dure:
                ratio = f"{statistics.median(dure) / statistics.median(torchrun):.2f}×"
            digits = 0 if part == "memory" else 2
            cells = (_shown(torchrun, digits), _shown(dure, digits), ratio, _shown(fresh, digits))
            words = (str(ranks), what.replace(":", ", "), name, *cells)
            lines.append("| " + " | ".join(words) + " |")
        lines.append("")
    return "\n".join(lines)


def _shown(values: list[float] | None, digits: int) -> str:
    """Return the median, and the smallest and largest where there are several."""
    if not values:
        return ""
    said = f"{statistics.median(values):.{digits}f}"
    if len(values) == 1:
        return said
    return f"{said} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def save(path: Path, wanted: list[Case], busy: float) -> None:
    """Write all figures, and on what machine they were taken."""
    report = {
        "command": " ".join(["python", "benchmarks/launch.py", *sys.argv[1:]]),
        **conditions(**{"Others at work": f"{busy:.1f} cores busy just before"}),
        "cases": [
            {
                "part": case.part,
                "launcher": case.launcher,
                "ranks": case.ranks,
                "what": case.what,
                "figures": case.figures,
            }
            for case in wanted
        ],
    }
    path.write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--write", action="store_true", help="into results/ and docs/")
    options = parser.parse_args()
    busy = busy_cores()
    wanted = cases(options.only, options.ranks)
    measure(wanted, options.rounds)
    print(tables(wanted))
    if options.write:
        save(RESULTS, wanted, busy)
        page = PAGE.read_text()
        begin, end = "<!-- figures: launch -->", "<!-- end: launch -->"
        before, _, rest = page.partition(begin)
        after = rest.partition(end)[2]
        PAGE.write_text(f"{before}{begin}\n\n{tables(wanted)}{end}{after}")


if __name__ == "__main__":
    main()

"""Run the tests: one queue of test files, taken by one more process of pytest than there are cores.

    python scripts/tests.py [--below FOLDER]... [--skips FILE] [--lanes N] [--keep-times]
        [ARGUMENT OF PYTEST]...

The file that took longest last time comes first (`tests/times.json`), so that the last files are
short. A *lane* takes a *batch* of files from the queue, runs it in a fresh pytest, and takes the
next: heaps stay small, no test depends on those of another batch, and a crash ends one batch. Many
tests wait for processes, so there is one lane more than cores. Output is shown for batches that
fail; the others take one line each. If the arguments name tests, one pytest runs those alone.

The last line has what passed, what failed, and what did not run, by what was missing. Nothing is
run again: a failure is a failure. A test that is known to be unsteady may be listed in
`tests/unsteady.txt`, for a week: it is then named with the failure, and does not fail the run.
With `--skips FILE`, tests that did not run fail the run, unless the file lists what they need.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from forked_pytest import ForkedPytest

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
TIMES = TESTS / "times.json"
UNSTEADY = TESTS / "unsteady.txt"
UNSTEADY_DAYS = 7
BATCH_S = 30.0  # about what a batch takes, alone
BATCH_LIMIT_S = 2400.0  # only ends what pytest's own limit per test could not
UNKNOWN_S = 3.0  # what a file that is not in `TIMES` is taken to need
# Modules that most batches need: imported once, and not in each batch and each of its ranks.
MODULES = [
    *("dure.testing.pool", "dure.comm.init", "dure.comm.collectives", "dure.tensor"),
    *("dure.parallel.fsdp", "dure.checkpoint", "hypothesis.strategies", "networkx"),
]
PYTEST = [sys.executable, "-m", "pytest"]
TESTS_FAILED = 1  # pytest's exit status; any other than 0 means that something else went wrong
NO_TESTS = 5
SLOWEST = 15


def file_of(test: str) -> str:
    """Return the file of a test, as pytest names it."""
    return test.partition("::")[0]


@dataclass
class Results:
    """What became of the tests of all batches. Threads: each method locks."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    skips: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)  # of each test
    broken: list[str] = field(default_factory=list)  # batches that ended before their tests had
    late: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, log: Path) -> Counter[str]:
        """Add a batch's report; return how many of its tests ended in which way."""
        reports = [json.loads(line) for line in log.read_text().splitlines()]
        ends: dict[str, str] = {}
        with self.lock:
            for report in reports:
                name = report.get("nodeid", "")
                if report["$report_type"] == "CollectReport":
                    if report["outcome"] == "failed":
                        ends[name] = "failed"
                    elif report["outcome"] == "skipped":
                        ends[name] = "skipped"
                        self.skips[need(str(report["longrepr"]))] += 1
                elif report["$report_type"] == "TestReport":
                    self.seconds[name] += report["duration"]
                    if report["outcome"] == "failed":
                        ends[name] = "failed"
                    elif report["outcome"] == "skipped":
                        ends.setdefault(name, "skipped")
                        self.skips[need(str(report["longrepr"]))] += 1
                    elif report["when"] == "call":
                        ends.setdefault(name, "passed")
            counts = Counter(ends.values())
            self.outcomes += counts
            self.failed += [name for name, end in ends.items() if end == "failed"]
        return counts


def need(reason: str) -> str:
    """Return what a skipped test needs, of the text that pytest reports for it."""
    text = reason.rpartition("Skipped: ")[2].rstrip("')\"")
    found = re.match(r"needs ([^:]+)", text)
    return found[1].strip() if found else text


class Queue:
    """The files that no lane has taken yet, those that take longest first. Threads: locks."""

    def __init__(self, times: dict[str, float], lanes: int, folders: list[str]) -> None:
        paths = [path for folder in folders for path in (ROOT / folder).rglob("test_*.py")]
        found = sorted({str(path.relative_to(ROOT)) for path in paths})
        self._left = sorted(
            ((times.get(name, UNKNOWN_S), name) for name in found), key=lambda pair: -pair[0]
        )
        self._lanes, self._lock = lanes, threading.Lock()

    def take(self) -> list[str]:
        """Take the next batch: smaller ones towards the end, so that all lanes end together."""
        with self._lock:
            left = sum(seconds for seconds, _ in self._left)
            most = min(BATCH_S, max(8.0, left / (2 * self._lanes)))
            batch: list[str] = []
            while self._left and most > 0:
                seconds, name = self._left.pop(0)
                batch.append(name)
                most -= seconds
                # A long file would have come before: what follows fills the batch up.
                if batch and self._left and self._left[0][0] > most:
                    break
            return batch

    def clear(self) -> None:
        """Remove the remaining batches."""
        with self._lock:
            self._left.clear()


class Lane:
    """Runs batches one after another, until none is left."""

    def __init__(
        self, pytest: ForkedPytest, queue: Queue, results: Results, words: list[str], name: Path
    ) -> None:
        self._pytest, self._queue, self._results = pytest, queue, results
        self._words, self._name = words, name
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the queue is empty, and this lane's last batch has ended."""
        self._thread.join()

    def _run(self) -> None:
        number = 0
        while batch := self._queue.take():
            number += 1
            try:
                self._batch(batch, self._name.with_suffix(f".{number}.jsonl"))
            except Exception as e:  # such as a log that is cut off, or a server that has ended
                self._results.broken.append(f"{e!r}: {' '.join(batch)}")

    def _batch(self, files: list[str], log: Path) -> None:
        begin = time.monotonic()
        words = [f"--report-log={log}", "-q", "-p", "no:cacheprovider", "--no-header", "-rN"]
        status, output = self._pytest.run(
            [*words, *self._words, *files], self._name.with_suffix(".out")
        )
        counts = self._results.read(log) if log.exists() else Counter[str]()
        if status not in (0, TESTS_FAILED, NO_TESTS) or (
            status == TESTS_FAILED and not counts["failed"]
        ):
            self._results.broken.append(f"status {status}: {' '.join(files)}")
        self._results.late += re.findall(r"^LEFT LATE (.*)$", output, re.MULTILINE)
        if status not in (0, NO_TESTS):
            print(output, flush=True)
        ends = ", ".join(f"{counts[w]} {w}" for w in ("passed", "failed", "skipped") if counts[w])
        took = time.monotonic() - begin
        names = " ".join(name.removeprefix("tests/") for name in files)
        print(f"{took:5.0f} s  {ends or 'no tests'}: {names}", flush=True)


def unsteady(today: datetime.date) -> tuple[set[str], list[str]]:
    """Return the tests that may fail today, and the lines of the list that are too old."""
    names: set[str] = set()
    old: list[str] = []
    for line in UNSTEADY.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            date, name, _ = line.split(maxsplit=2)
            age = today - datetime.date.fromisoformat(date)
            if age.days > UNSTEADY_DAYS:
                old.append(line)
            names.add(name)
    return names, old


def listed(skips: str | None) -> set[str] | None:
    """Return what tests may need and not find; None: anything."""
    if skips is None:
        return None
    lines = Path(skips).read_text().splitlines()
    return {line.partition(":")[0].strip() for line in lines if line and line[0] != "#"}


def report(results: Results, took: float, allowed: set[str] | None) -> int:
    """Print what there is to say at the end, the counts last; return the exit status."""
    may_fail, old = unsteady(datetime.date.today())
    print(f"\nslowest tests (of {sum(results.seconds.values()):.0f} s together):")
    for name, seconds in results.seconds.most_common(SLOWEST):
        print(f"{seconds:7.1f} s  {name}")
    for line in results.late:
        print(f"LEFT LATE {line}")
    bad = [name for name in results.failed if name not in may_fail]
    for name in sorted(results.failed):
        print(f"{'FAILED' if name in bad else 'UNSTEADY'} {name}")
    for line in results.broken:
        print(f"FAILED pytest ended with {line}")
    for line in old:
        print(f"FAILED tests/unsteady.txt: more than {UNSTEADY_DAYS} days old: {line}")
    unlisted = set(results.skips) - allowed if allowed is not None else set()
    for name in sorted(unlisted):
        print(f"FAILED {results.skips[name]} tests did not run, for what is not listed: {name}")
    not_run = ", ".join(f"{name}: {count}" for name, count in sorted(results.skips.items()))
    counts = results.outcomes
    print(
        f"=== {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped"
        f" in {took:.0f}s{f'; not run: {not_run}' if not_run else ''} ===",
        flush=True,
    )
    return 1 if bad or results.broken or old or unlisted else 0


def main(arguments: list[str]) -> int:
    """Run the tests; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--skips", help="a file with what tests may need and not find")
    parser.add_argument("--below", action="append", help="a folder of tests; else all of them")
    parser.add_argument("--lanes", type=int, default=(os.cpu_count() or 1) + 1)
    parser.add_argument("--keep-times", action="store_true", help="write tests/times.json anew")
    options, words = parser.parse_known_args(arguments)
    if any(Path(file_of(word)).exists() for word in words):
        return subprocess.run([*PYTEST, "-rs", *words], check=False).returncode
    begin = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("the tests were stopped"))
    results = Results()
    times = json.loads(TIMES.read_text()) if TIMES.exists() else {}
    queue = Queue(times, options.lanes, options.below or ["tests"])
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ)
        # Hundreds of processes import the package: it is compiled once, whatever the shell says.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        pytest = ForkedPytest(Path(sys.executable), ROOT, environment, BATCH_LIMIT_S, MODULES)
        lanes = [
            Lane(pytest, queue, results, words, Path(folder, f"lane-{number}"))
            for number in range(options.lanes)
        ]
        try:
            for lane in lanes:
                lane.wait()
        finally:
            queue.clear()
            pytest.kill()
            pytest.close()
    if options.keep_times:
        seconds: Counter[str] = Counter()
        for name, took in results.seconds.items():
            seconds[file_of(name)] += took
        kept = {name: round(took, 1) for name, took in sorted(seconds.items()) if took >= 0.5}
        TIMES.write_text(json.dumps(kept, indent=0) + "\n")
    return report(results, time.monotonic() - begin, listed(options.skips))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

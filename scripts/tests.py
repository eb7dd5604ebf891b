"""Run the tests, in two halves beside each other.

    python scripts/tests.py [--second-look] [ARGUMENT OF PYTEST]...

One half is the tests that start processes and mostly wait for them, the other all the rest, so that
two cores are busy. The second half's output is shown as it comes, that of the first when it has
ended; a last line adds them up. Where the arguments name tests, these are run, by one pytest.

On a machine that others use as well, one test of thousands can fail by chance. With
`--second-look`, where at most `MOST` have failed, each is run again, alone, `TIMES` times in a row:
if it passes every time it is *unsteady*. Unsteady tests are named at the end, and do not fail the
run. All else does: more failures than that, one that comes again, an error outside of a test that
failed (what a module leaves behind shows there, and not in a test that runs alone), and whatever
ends pytest before its end.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import IO
from xml.etree import ElementTree

MOST = 3
TIMES = 3
TESTS_FAILED = 1  # pytest's own exit status; any other than 0 says that something else went wrong
PYTEST = [sys.executable, "-m", "pytest"]
FOLDERS = ["tests/procs", "tests/faults", "tests/security"]
# What waits for processes can be interrupted, so that a test that hangs fails and the rest go on;
# thread-ranks in the engine cannot, and end pytest.
WITH_PROCESSES = [*FOLDERS, "-o", "timeout_method=signal", "-o", "faulthandler_timeout=600"]
ALL_OTHERS = ["tests", *(f"--ignore={folder}" for folder in FOLDERS)]


class Half:
    """One run of pytest in the background."""

    def __init__(self, words: list[str], folder: Path, output: IO[str]) -> None:
        self._report, self._cache = folder / "report.xml", folder / "cache"
        own = [f"--junitxml={self._report}", "-o", f"cache_dir={self._cache}"]
        self._process = subprocess.Popen(
            [*PYTEST, "-rfEs", *own, *words], stdout=output, stderr=subprocess.STDOUT
        )

    def wait(self) -> int:
        """Return its exit status."""
        return self._process.wait()

    def kill(self) -> None:
        """End it, if it has not ended."""
        self._process.kill()

    def counts(self) -> Counter[str]:
        """How many tests there were, and how many ended badly, by the report's words."""
        found: Counter[str] = Counter()
        if self._report.exists():
            for suite in ElementTree.parse(self._report).iter("testsuite"):
                found += Counter({k: int(suite.get(k, 0)) for k in _WORDS})
                found["errors"] -= _errors_of_failed(suite)
        return found

    def failed(self) -> list[str]:
        """Return the tests that failed."""
        kept = self._cache / "v/cache/lastfailed"
        return sorted(json.loads(kept.read_text())) if kept.exists() else []


def _errors_of_failed(suite: ElementTree.Element) -> int:
    """Count the errors after tests that had failed already: what they left behind."""
    names: dict[str, list[tuple[str | None, str | None]]] = {"failure": [], "error": []}
    for case in suite.iter("testcase"):
        for word, found in names.items():
            if case.find(word) is not None:
                found.append((case.get("classname"), case.get("name")))
    return sum(name in names["failure"] for name in names["error"])


_WORDS = ("tests", "failures", "errors", "skipped")


def main(arguments: list[str]) -> int:
    """Run the tests; return the exit status."""
    second_look = "--second-look" in arguments
    arguments = [word for word in arguments if word != "--second-look"]
    if any(Path(word.partition("::")[0]).exists() for word in arguments):
        return subprocess.run([*PYTEST, "-rs", *arguments], check=False).returncode
    begin = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("the tests were stopped"))
    with ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2)]
        output = stack.enter_context(tempfile.TemporaryFile("w+"))
        halves = [
            Half(WITH_PROCESSES + arguments, folders[0], output),
            Half([*ALL_OTHERS, *arguments], folders[1], sys.stdout),
        ]
        try:
            statuses = [half.wait() for half in reversed(halves)]
        finally:
            for half in halves:
                half.kill()
            output.seek(0)
            print(f"\n--- the tests with processes\n{output.read()}", flush=True)
        counts = sum((half.counts() for half in halves), Counter[str]())
        failed = [name for half in halves for name in half.failed()]
    _tell(counts, time.monotonic() - begin)
    if any(status not in (0, TESTS_FAILED) for status in statuses):
        return max(statuses)
    if TESTS_FAILED not in statuses:
        return 0
    if not second_look:
        return TESTS_FAILED
    if counts["errors"] or not 0 < len(failed) <= MOST:
        errors = counts["errors"]
        print(f"no second look: {len(failed)} tests failed, or had one of {errors} errors beside")
        return TESTS_FAILED
    return _second_look(failed)


def _tell(counts: Counter[str], took: float) -> None:
    bad = counts["failures"] + counts["errors"] + counts["skipped"]
    words = {"passed": counts["tests"] - bad, "failed": counts["failures"]}
    words |= {"skipped": counts["skipped"], "error": counts["errors"]}
    told = ", ".join(f"{number} {word}" for word, number in words.items() if number)
    print(f"=== {told} in {took:.0f}s ===", flush=True)


def _second_look(failed: list[str]) -> int:
    again = [name for name in failed if not all(_passes(name, i + 1) for i in range(TIMES))]
    if again:
        print(f"failed again, alone: {', '.join(again)}")
        return TESTS_FAILED
    told = f"{len(failed)} test(s) failed once and then passed {TIMES} times alone"
    print(f"unsteady: {told}: {', '.join(failed)}")
    return 0


def _passes(name: str, number: int) -> bool:
    print(f"second look, {number} of {TIMES}: {name}", flush=True)
    once = [*PYTEST, "-q", "--no-header", "-p", "no:cacheprovider", name]
    return subprocess.run(once, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

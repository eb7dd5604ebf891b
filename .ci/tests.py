"""Run all tests, and give the few that fail a second look.

    python .ci/tests.py [ARGUMENT OF PYTEST]...

On a machine that others use as well, one test of thousands can fail by chance. So where at most
`MOST` have failed, each is run again, alone, `TIMES` times in a row: if it passes every time it is
*unsteady*. Unsteady tests are named at the end, and do not fail the run. All else does: more
failures than that, one that comes again, an error outside of a test (what a module leaves behind
shows there, and not in a test that runs alone), and whatever ends pytest before its end.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

MOST = 3
TIMES = 3
TESTS_FAILED = 1  # pytest's own exit status; any other than 0 says that something else went wrong
KEPT = Path(".pytest_cache/v/cache/lastfailed")  # written only by a pytest that came to its end
PYTEST = [sys.executable, "-m", "pytest"]


def main(arguments: list[str]) -> int:
    """Run the tests; return the exit status."""
    KEPT.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        words = [*PYTEST, "-rfEs", f"--junitxml={report}", *arguments]
        status = subprocess.run(words, check=False).returncode
        if status != TESTS_FAILED or not report.exists() or not KEPT.exists():
            return status
        errors = sum(int(s.get("errors", 0)) for s in ElementTree.parse(report).iter("testsuite"))
    failed = sorted(json.loads(KEPT.read_text()))
    if errors or not 0 < len(failed) <= MOST:
        print(f"no second look: {len(failed)} tests failed, or had one of {errors} errors beside")
        return status
    again = [name for name in failed if not all(_passes(name, i + 1) for i in range(TIMES))]
    if again:
        print(f"failed again, alone: {', '.join(again)}")
        return status
    told = f"{len(failed)} test(s) failed once and then passed {TIMES} times alone"
    print(f"unsteady: {told}: {', '.join(failed)}")
    return 0


def _passes(name: str, number: int) -> bool:
    print(f"second look, {number} of {TIMES}: {name}", flush=True)
    once = [*PYTEST, "-q", "--no-header", "-p", "no:cacheprovider", name]
    return subprocess.run(once, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

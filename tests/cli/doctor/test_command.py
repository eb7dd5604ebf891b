"""The checks of `dure doctor` run beside each other."""

from __future__ import annotations

import threading

from dure.cli.doctor.checks import Finding, Level, fine
from dure.cli.doctor.command import run_checks
from tests.waiting import PATIENCE_S

OK, NOTE, WARNING, PROBLEM = Level.OK, Level.NOTE, Level.WARNING, Level.PROBLEM


def test_check_that_fails_or_hangs_ends_no_other() -> None:
    let_go = threading.Event()

    def fails() -> list[Finding]:
        raise PermissionError("/proc/x")

    def hangs() -> list[Finding]:
        let_go.wait()
        return []

    # The time is up when the first two have been waited for.
    times = iter([0.0, 0.0, 0.0, PATIENCE_S + 1.0])
    wanted = {"fails": fails, "works": lambda: [fine("works", "yes")], "hangs": hangs}
    found = run_checks(wanted, PATIENCE_S, clock=lambda: next(times))
    let_go.set()
    seen = [(f.check, f.level) for f in found]
    assert seen == [("fails", WARNING), ("works", OK), ("hangs", WARNING)]

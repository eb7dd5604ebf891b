"""Programs of Dure's own commands on several ranks: started as by `dure run`, and read.

Rank 0 reports what the command is to show, as lines of the form `{"dure": {...}}`.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any  # Any: rank 0's report as JSON

import typer

from dure.cli.machine import QUIET_VARIABLES
from dure.errors import UsageError
from dure.launch import JobSpec, Line, RankResult, run_job

_MARK = '{"dure": '
_USER_ERRORS = {"UsageError", "DataError"}
_KEPT_LINES = 200


def run_ranks(
    module: str, args: Sequence[str], ranks: int, on_report: Callable[[dict[str, Any]], object]
) -> None:
    """Run a module of Dure on `ranks` ranks, and pass each report of rank 0 to `on_report`.

    All other lines that ranks write go to the standard error when the job has ended.

    Raises:
        UsageError: A rank reports a mistake of the user.
        LaunchError: A rank failed.
    """
    others: deque[str] = deque(maxlen=_KEPT_LINES)

    def read(line: Line) -> None:
        text = line.text.decode(errors="replace")
        if text.startswith(_MARK):
            on_report(json.loads(text)["dure"])
        else:
            others.append(f"[{line.rank}] {text}")

    result = run_job(
        JobSpec(
            program=module,
            kind="module",
            args=tuple(args),
            nproc=ranks,
            env=QUIET_VARIABLES,
            on_line=read,
            stdin="none",
            quiet=True,
        )
    )
    failure = result.first_failure
    if failure is not None:
        _check_mistake(failure)
    for line in others:
        print(line, file=sys.stderr)
    if not result.ok and failure is None:  # interrupted: the user knows
        raise typer.Exit(result.exit_code)
    result.check()


def _check_mistake(failure: RankResult) -> None:
    crash = failure.crash
    if crash is not None and crash.type.rpartition(".")[2] in _USER_ERRORS:
        raise UsageError(crash.message)

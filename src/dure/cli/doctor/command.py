"""`dure doctor`: runs every check, each on a thread with a time limit, and shows the findings.

The machine is read before the collectives are tried, so that their load is not measured. A check
that raises becomes a warning that names it, and so does one that is late: a thread cannot be ended,
but it is a daemon, and the command does not wait for it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dure.cli.doctor import checks, collectives
from dure.cli.doctor.checks import Finding, Findings, Level, warning
from dure.errors import UsageError

_READ_LIMIT_S = 4.0
_STYLES = {
    Level.OK: "green",
    Level.NOTE: "blue",
    Level.WARNING: "yellow",
    Level.PROBLEM: "bold red",
}
Check = Callable[[], Iterable[Finding]]


def doctor(
    hosts: Annotated[
        str | None,
        typer.Option(help="Also try a collective over these hosts (node[1-4],other), by ssh."),
    ] = None,
    ssh_option: Annotated[
        list[str] | None, typer.Option(help="With --hosts: an option for ssh, such as -p2222.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    collective: Annotated[
        bool, typer.Option(help="Try a small collective on each backend.")
    ] = True,
    limit: Annotated[float, typer.Option(help="Seconds for the collectives.")] = 30.0,
    as_report: Annotated[
        bool,
        typer.Option("--report", help="Print what a bug report needs, as Markdown, no secrets."),
    ] = False,
    traces: Annotated[
        Path | None,
        typer.Option(help="With --report: a folder with traces or error files of the job."),
    ] = None,
) -> None:
    """Check this machine: what is wrong, and what to do about it."""
    if traces is not None and not as_report:
        raise UsageError("--traces needs --report", fix="Add --report.")
    start = time.monotonic()
    attempts: dict[str, Check] = {"GPUs": lambda: checks.gpus({})}
    if collective:
        attempts = {
            "collectives": lambda: _try_backends(limit),
            "mpi": lambda: collectives.try_mpi(limit),
        }
    if hosts is not None:
        flags = ["--hosts", hosts, *(f"--ssh-option={o}" for o in ssh_option or []), "--nproc=1"]
        attempts["hosts"] = lambda: collectives.try_hosts(flags, limit)
    found = run_checks({check.__name__: check for check in checks.CHECKS}, _READ_LIMIT_S)
    found += run_checks(attempts, limit + _READ_LIMIT_S)
    if as_report:
        from dure.cli.doctor.report import report  # lazy: only for a bug report

        print(report(found, traces), end="")
        return
    (_print_json if as_json else _print_table)(found, time.monotonic() - start)
    raise typer.Exit(int(any(finding.level is Level.PROBLEM for finding in found)))


def _try_backends(limit_s: float) -> Findings:
    attempt = collectives.try_backends(("shm", "gloo"), limit_s)
    yield from checks.gpus(attempt.torch)
    yield from collectives.judge(attempt)
    if len(attempt.torch.get("gpus", [])) > 1:
        yield from collectives.judge(collectives.try_backends(("nccl",), limit_s))


def run_checks(
    wanted: Mapping[str, Check], limit_s: float, clock: Callable[[], float] = time.monotonic
) -> list[Finding]:
    """Run checks at the same time, and return their findings in the order of the checks."""
    results: dict[str, list[Finding]] = {}

    def run(name: str, check: Check) -> None:
        try:
            found = list(check())
        except Exception as error:  # one check's failure must not end the others
            seen = f"could not be checked: {type(error).__name__}: {error}"
            found = [warning(name, seen, "The other checks do not depend on it.")]
        results.setdefault(name, found)

    deadline = clock() + limit_s
    threads = {
        name: threading.Thread(target=run, args=(name, check), daemon=True)
        for name, check in wanted.items()
    }
    for thread in threads.values():
        thread.start()
    for name, thread in threads.items():
        thread.join(max(0.0, deadline - clock()))
        late = f"no answer within {limit_s:.0f} s"
        advice = "The machine is very busy, or this check hangs."
        results.setdefault(name, [warning(name, late, advice)])
    return [finding for name in wanted for finding in results[name]]


def _print_json(findings: Sequence[Finding], elapsed_s: float) -> None:
    content = [asdict(finding) | {"level": finding.level.value} for finding in findings]
    worst = max((f.level for f in findings), key=list(Level).index, default=Level.OK)
    summary = {"worst": worst.value, "elapsed_s": round(elapsed_s, 3)}
    print(json.dumps(summary | {"findings": content}, indent=1))


def _print_table(findings: Sequence[Finding], elapsed_s: float) -> None:
    console = Console()
    table = Table(box=None, pad_edge=False, show_header=False)
    for column in range(3):
        table.add_column(overflow="fold", no_wrap=column == 0)
    for finding in findings:
        mark = finding.level.value
        mark = mark.upper() if finding.level is Level.PROBLEM else mark
        seen = Text(finding.seen)
        if finding.advice:
            seen.append(f"\n→ {finding.advice}", "cyan")
        table.add_row(Text(mark, _STYLES[finding.level]), Text(finding.check, "bold"), seen)
    console.print(table)
    problems, warnings = (
        sum(f.level is level for f in findings) for level in (Level.PROBLEM, Level.WARNING)
    )
    text = f"{_number(problems, 'problem')}, {_number(warnings, 'warning')}."
    text = text if problems + warnings else "Nothing is wrong."
    style = "bold red" if problems else "yellow" if warnings else "green"
    console.print(Text(f"\n{text} ({elapsed_s:.1f} s)", style))


def _number(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"

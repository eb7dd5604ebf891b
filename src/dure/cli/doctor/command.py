"""`dure doctor`: runs every check, and shows the findings.

The machine is read before the collectives are tried, so that their load is not measured. A check
that raises becomes a warning that names it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dure.cli.doctor import checks
from dure.cli.doctor.checks import Finding, Level, warning
from dure.errors import UsageError
from dure.launch.clusters.hosts import read_hosts

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
    limit: Annotated[float, typer.Option(help="Seconds for the collectives.", min=1)] = 30.0,
    as_report: Annotated[
        bool,
        typer.Option("--report", help="Print what a bug report needs, as Markdown, no secrets."),
    ] = False,
    traces: Annotated[
        Path | None,
        typer.Option(help="With --report: a folder with traces or error files of the job."),
    ] = None,
) -> None:
    """Check this machine, and advise how to mend faults."""
    if traces is not None and not as_report:
        raise UsageError("--traces has no effect without --report")
    if ssh_option and hosts is None:
        raise UsageError("--ssh-option has no effect without --hosts")
    start, wanted = time.monotonic(), dict[str, Check]((c.__name__, c) for c in checks.CHECKS)
    if collective:
        wanted["collectives"] = lambda: checks.collectives(limit)
    else:
        wanted["GPUs"] = lambda: checks.gpus({})
    if hosts is not None:
        read_hosts(hosts)  # a list that cannot be read is no finding
        flags = ["--hosts", hosts, *(f"--ssh-option={option}" for option in ssh_option or [])]
        wanted["hosts"] = lambda: checks.hosts(flags, limit)
    found = [finding for name, check in wanted.items() for finding in run_check(name, check)]
    if as_report:
        from dure.cli.doctor.report import report  # lazy: only for a bug report

        print(report(found, traces), end="")
        return
    (_print_json if as_json else _print_table)(found, time.monotonic() - start)
    raise typer.Exit(int(any(finding.level is Level.PROBLEM for finding in found)))


def run_check(name: str, check: Check) -> list[Finding]:
    """Return a check's findings, or a warning if it fails."""
    try:
        return list(check())
    except Exception as error:  # one check's failure must not end the others
        seen = f"could not be checked: {type(error).__name__}: {error}"
        return [warning(name, seen, "The other checks do not depend on it.")]


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
    levels = [finding.level for finding in findings]
    problems, warnings = levels.count(Level.PROBLEM), levels.count(Level.WARNING)
    style = "bold red" if problems else "yellow" if warnings else "green"
    text = f"\nproblems: {problems}, warnings: {warnings} ({elapsed_s:.1f} s)"
    console.print(Text(text, style))

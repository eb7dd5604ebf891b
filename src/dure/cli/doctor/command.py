"""`dure doctor`: runs every check, each on a thread of its own with a time limit, and shows them.

`machine` reads what the machine shows, and `checks` judges such values without looking at anything
else, so that a test can make up a machine. `collectives` (with `rank`) and `hosts` start processes
here and elsewhere.

The machine is read before the collectives are tried, so that the load is not ours. A check that
raises becomes a warning that names it, and so does one that is late: a thread cannot be ended, but
it is a daemon and the command does not wait for it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any  # Any: what a rank told as JSON

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dure import env
from dure.cli.doctor import checks, collectives, hosts, machine
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
    hosts_to_ask: Annotated[
        str | None,
        typer.Option("--hosts", help="Also ask these hosts (node[1-4],other), over ssh."),
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
    answer: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Check this machine, and say in plain words what is wrong and what to do."""
    if answer is not None:  # a doctor on another host asks
        hosts.answer(answer)
        return
    if traces is not None and not as_report:
        raise UsageError("--traces belongs to --report", fix="Add --report.")
    start = time.monotonic()
    found = _examine(collective=collective, limit_s=limit)
    if hosts_to_ask is not None:
        options = ssh_option or []
        found += hosts.examine(hosts_to_ask, options, collective=collective, limit_s=limit)
    if as_report:
        from dure.cli.doctor.report import report  # lazy: the usual doctor needs none

        print(report(found, traces), end="")
        return
    (_print_json if as_json else _print_table)(found, time.monotonic() - start)
    raise typer.Exit(int(any(finding.level is Level.PROBLEM for finding in found)))


def _examine(*, collective: bool, limit_s: float) -> list[Finding]:
    found = run_checks(machine.CHECKS, _READ_LIMIT_S)
    if not collective:
        return found + run_checks({"GPUs": lambda: _cards({})}, _READ_LIMIT_S)
    attempts: dict[str, Check] = {
        "collectives": lambda: _try_backends(limit_s),
        "mpi": lambda: collectives.try_mpi(limit_s),
    }
    return found + run_checks(attempts, limit_s + _READ_LIMIT_S)


def _try_backends(limit_s: float) -> Findings:
    attempt = collectives.try_backends(("shm", "gloo"), limit_s)
    yield from _cards(attempt.torch)
    yield from collectives.judge(attempt)
    if len(attempt.torch.get("gpus", [])) > 1:
        yield from collectives.judge(collectives.try_backends(("nccl",), limit_s))


def _cards(torch: Mapping[str, Any]) -> Findings:
    cards, error = machine.nvidia_cards()
    return checks.gpus(cards, error, torch, bool(env.text("CUDA_VISIBLE_DEVICES")))


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
            found = [warning(name, seen, "The rest does not depend on it.")]
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
        advice = "The machine is very busy, or this part hangs."
        results.setdefault(name, [warning(name, late, advice)])
    return [finding for name in wanted for finding in results[name]]


def _print_json(findings: list[Finding], elapsed_s: float) -> None:
    content = [asdict(finding) | {"level": finding.level.value} for finding in findings]
    worst = max((f.level for f in findings), key=list(Level).index, default=Level.OK)
    summary = {"worst": worst.value, "elapsed_s": round(elapsed_s, 3)}
    print(json.dumps(summary | {"findings": content}, indent=1))


def _print_table(findings: list[Finding], elapsed_s: float) -> None:
    console = Console()
    several = any(finding.host for finding in findings)
    table = Table(box=None, pad_edge=False, show_header=False)
    for column in range(3 + several):
        table.add_column(overflow="fold", no_wrap=column == 0)
    for finding in findings:
        mark = finding.level.value
        mark = mark.upper() if finding.level is Level.PROBLEM else mark
        seen = Text(finding.seen)
        if finding.advice:
            seen.append(f"\n→ {finding.advice}", "cyan")
        host = [Text(finding.host or "this host")] if several else []
        table.add_row(Text(mark, _STYLES[finding.level]), *host, Text(finding.check, "bold"), seen)
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

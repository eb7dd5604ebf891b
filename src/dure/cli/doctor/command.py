"""`dure doctor`: runs every check, each on a thread of its own with a time limit, and shows them.

The collectives are started first, for they take the longest; the machine is read meanwhile. A check
that raises becomes a warning that names it, and so does one that is late: a thread cannot be ended,
but it is a daemon and the command does not wait for it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dure import env
from dure.cli.doctor import (
    clock,
    collectives,
    cores,
    gpus,
    hosts,
    keys,
    leftovers,
    limits,
    memory,
    names,
    ports,
    settings,
    sharing,
    versions,
)
from dure.cli.doctor.finding import Finding, Level, warning

__all__ = ["doctor", "examine", "run_checks"]

_READ_LIMIT_S = 4.0
_MARKS = {
    Level.OK: ("ok", "green"),
    Level.NOTE: ("note", "blue"),
    Level.WARNING: ("warning", "yellow"),
    Level.PROBLEM: ("PROBLEM", "bold red"),
}
Check = Callable[[], list[Finding]]


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
    answer: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Check this machine, and say in plain words what is wrong and what to do."""
    if answer is not None:  # a doctor on another host asks
        raise typer.Exit(hosts.answer(answer))
    start = time.monotonic()
    findings = examine(collective=collective, limit_s=limit)
    if hosts_to_ask is not None:
        options = tuple(ssh_option or ())
        findings += hosts.examine(
            hosts_to_ask, collective=collective, limit_s=limit, options=options
        )
    elapsed_s = time.monotonic() - start
    bad = any(finding.level is Level.PROBLEM for finding in findings)
    if as_json:
        _print_json(findings, elapsed_s)
    else:
        _print_table(findings, elapsed_s)
    raise typer.Exit(1 if bad else 0)


def examine(*, collective: bool, limit_s: float) -> list[Finding]:
    """Run all checks of this host.

    Args:
        collective: Whether to try the backends.
        limit_s: How long each attempt with processes may take.
    """
    checks: dict[str, Check] = {
        "versions": lambda: versions.judge(versions.read()),
        "cores": lambda: cores.judge(cores.read()),
        "memory": lambda: memory.judge(memory.read()),
        "sharing": lambda: sharing.judge(sharing.read()),
        "limits": lambda: limits.judge(limits.read()),
        "names": lambda: names.judge(names.read()),
        "ports": lambda: ports.judge(ports.read()),
        "clock": lambda: clock.judge(clock.read()),
        "keys": lambda: keys.judge(keys.read()),
        "environment": lambda: settings.judge(settings.read(cores.read().usable)),
        "leftovers": lambda: leftovers.judge(leftovers.read()),
    }
    if not collective:
        seen = _cards({})
        return run_checks(checks | {"GPUs": lambda: seen}, _READ_LIMIT_S)
    # The load is read before ours begins, so the ranks start when the rest is done.
    found = run_checks(checks, _READ_LIMIT_S)
    return found + run_checks(
        {
            "collectives": lambda: _try_backends(limit_s),
            "mpi": lambda: collectives.judge(collectives.try_mpi(limit_s)),
        },
        limit_s + _READ_LIMIT_S,
    )


def _try_backends(limit_s: float) -> list[Finding]:
    attempt = collectives.try_backends(("shm", "gloo"), limit_s)
    found = _cards(attempt.torch) + collectives.judge(attempt)
    if len(attempt.torch.get("gpus", [])) > 1:
        found += collectives.judge(collectives.try_backends(("nccl",), limit_s))
    return found


def _cards(torch: dict[str, object]) -> list[Finding]:
    usual = (env.text("CUDA_VISIBLE_DEVICES") or "").split(",")
    return gpus.judge(gpus.read(), torch, tuple(filter(None, usual)))


def run_checks(checks: dict[str, Check], limit_s: float) -> list[Finding]:
    """Run checks at the same time, and return their findings in the order of the checks."""
    results: dict[str, list[Finding]] = {}
    threads = {
        name: threading.Thread(target=_run, args=(name, check, results), daemon=True)
        for name, check in checks.items()
    }
    for thread in threads.values():
        thread.start()
    deadline = time.monotonic() + limit_s
    for name, thread in threads.items():
        thread.join(max(0.0, deadline - time.monotonic()))
        if name not in results:
            late = f"no answer within {limit_s:.0f} s"
            results[name] = [warning(name, late, "The machine is very busy, or this part hangs.")]
    return [finding for name in checks for finding in results[name]]


def _run(name: str, check: Check, results: dict[str, list[Finding]]) -> None:
    try:
        found = check()
    except Exception as error:  # one check's failure must not end the others
        seen = f"could not be checked: {type(error).__name__}: {error}"
        found = [warning(name, seen, "The rest does not depend on it.")]
    results.setdefault(name, found)


def _print_json(findings: list[Finding], elapsed_s: float) -> None:
    content = [asdict(finding) | {"level": finding.level.value} for finding in findings]
    worst = [level.value for level in Level if any(f.level is level for f in findings)]
    summary = {"worst": worst[-1] if worst else "ok", "elapsed_s": round(elapsed_s, 3)}
    print(json.dumps(summary | {"findings": content}, indent=1))


def _print_table(findings: list[Finding], elapsed_s: float) -> None:
    console = Console()
    several = any(finding.host for finding in findings)
    table = Table(box=None, pad_edge=False, show_header=False)
    for column in range(3 + several):
        table.add_column(overflow="fold", no_wrap=column == 0)
    for finding in findings:
        mark, style = _MARKS[finding.level]
        seen = Text(finding.seen)
        if finding.advice:
            seen.append(f"\n→ {finding.advice}", "cyan")
        host = [Text(finding.host or "this host")] if several else []
        table.add_row(Text(mark, style), *host, Text(finding.check, "bold"), seen)
    console.print(table)
    counts = {level: sum(f.level is level for f in findings) for level in Level}
    problems, warnings = counts[Level.PROBLEM], counts[Level.WARNING]
    verdict = (
        "Nothing is wrong."
        if not problems + warnings
        else f"{_number(problems, 'problem')}, {_number(warnings, 'warning')}."
    )
    style = "bold red" if problems else "yellow" if warnings else "green"
    console.print(Text(f"\n{verdict} ({elapsed_s:.1f} s)", style))


def _number(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"

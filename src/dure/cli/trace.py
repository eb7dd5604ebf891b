"""`dure trace`: the last operations of the ranks of a job, from their flight records."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dure.errors import UsageError
from dure.trace.calls import calls
from dure.trace.events import State
from dure.trace.findings import FlightFindings, GroupView, describe, study
from dure.trace.merging import Flight, read, read_file
from dure.trace.pipeline_steps import measured_step
from dure.trace.record import Record
from dure.trace.timeline import timeline

_MAX_COLUMNS = 8
_LONGEST_REASON = 200
_MOST_CALLS = 20

commands = typer.Typer(no_args_is_help=True)


@commands.command(
    help="Compare the records of all ranks: their last operations, and the mismatches."
)
def merge(
    folder: Annotated[
        Path, typer.Argument(help="The folder of the ranks' files (rank0.json, ...).")
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write a timeline for Perfetto or Chrome here."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the findings as JSON instead.")
    ] = False,
    last: Annotated[
        int, typer.Option(min=1, help="How many operations of each group to show.")
    ] = 10,
) -> None:
    """Read the files of all ranks in `folder`, compare them, and show what was found."""
    flight = read(folder)
    findings = study(flight)
    if output is not None:
        try:
            output.write_text(json.dumps(timeline(flight)))
        except OSError as error:
            raise UsageError(f"{output} cannot be written", seen=str(error)) from None
    if as_json:
        print(json.dumps(_as_json(flight, findings), indent=1))
        return
    console = Console()
    _print_merged(console, flight, findings, last)
    step = measured_step(flight)
    if step is not None:
        table = _table(
            f"Pipeline of group {step.group!r}, step {step.number}", "", "step", "bubble"
        )
        for name, each in (("measured", step.measured), ("simulated", step.simulated)):
            table.add_row(name, f"{each.step_time:.4g} ms", f"{each.bubble:.1%}")
        console.print(table)
    if output is not None:
        console.print(f"Timeline: {output} (open it in ui.perfetto.dev, or chrome://tracing)")


@commands.command(help="Show one rank's last operations, and where its threads were.")
def show(
    file: Annotated[Path, typer.Argument(help="A rank's file, such as rank0.json.")],
    last: Annotated[int, typer.Option(min=1, help="How many operations to show.")] = 20,
) -> None:
    """Print the last operations of one rank, oldest first, then the stacks of its threads."""
    rank = read_file(file)
    console = Console()
    console.print(
        Text(f"rank {rank.rank} of {rank.world_size}, {rank.host}, pid {rank.pid}: {rank.reason}")
    )
    table = _table("", "group", "operation", "took", "called at")
    for record in rank.records[-last:]:
        table.add_row(Text(record.group), Text(describe(record)), _took(record), Text(record.site))
    console.print(table)
    for thread in rank.threads:
        console.print(Text(f"{thread.name}:", "bold"))
        for frame in thread.stack:
            console.print(Text(f"  {frame}"))


def print_merged(console: Console, folder: Path, last: int = 10) -> None:
    """Print the records of all ranks in `folder` side by side, and what did not match."""
    flight = read(folder)
    _print_merged(console, flight, study(flight), last)


def _print_merged(console: Console, flight: Flight, findings: FlightFindings, last: int) -> None:
    for problem in flight.problems:
        console.print(Text(f"left out: {problem}", "yellow"))
    for group in findings.groups:
        if group.numbers:
            console.print(_side_by_side(flight, findings, group, last))
    for rank, file in flight.ranks.items():
        reason = textwrap.shorten(file.reason, _LONGEST_REASON)
        console.print(Text(f"rank {rank} ({file.host}, pid {file.pid}) wrote: {reason}"))
    for rank in set(flight.absent) - {absence.rank for absence in findings.absences}:
        console.print(Text(f"rank {rank} left no file", "yellow"))
    for record in findings.failures:
        text = f"rank {record.global_rank}: {describe(record)} of group {record.group!r} failed"
        place = f" at {record.site}" if record.file else ""
        console.print(Text(f"{text} with {record.error}{place}"))
    for sentence in findings.sentences:
        console.print(Text(sentence, "bold red"))
    crashed = any(file.failure for file in flight.ranks.values())
    if not findings.sentences and not findings.failures and not crashed:
        console.print(Text("The ranks' operations match.", "green"))
    _print_late_ranks(console, findings)
    _print_calls(console, flight)


def _side_by_side(flight: Flight, findings: FlightFindings, group: GroupView, last: int) -> Table:
    """Make a table of the group's last collectives: one row per number, one column per rank."""
    odd = next((d.seq for d in findings.differences if d.group == group.name), None)
    numbers = group.numbers[-last:]
    if odd is not None and odd not in numbers:
        numbers = [odd, *numbers]
    # If there are too many ranks, those that are absent and late come first.
    noted = [a.rank for a in findings.absences if a.group == group.name]
    late = sorted(findings.arrivals, key=lambda each: -each.num_last)
    noted += [each.rank for each in late if each.group == group.name]
    ranks = sorted(list(dict.fromkeys([*noted, *group.members]))[:_MAX_COLUMNS])
    more = len(group.members) - len(ranks)
    title = f"group {group.name}" + (f", {more} more ranks not shown" if more else "")
    table = _table(title, "#", *(f"rank {rank}" for rank in ranks))
    table.show_lines = True
    for seq in numbers:
        number = Text(f"> {seq}", "bold red") if seq == odd else Text(str(seq))
        table.add_row(number, *(_cell(flight, group, rank, seq) for rank in ranks))
    return table


def _cell(flight: Flight, group: GroupView, rank: int, seq: int) -> Text:
    calls = group.calls.get(rank)
    if calls is None:
        return Text("(no file)", "dim")
    record = calls.get(seq)
    if record is None:
        late = seq > group.last(rank)
        return Text("never called", "red") if late else Text("(forgotten)", "dim")
    what = describe(record).replace(f" #{seq}", "", 1)
    start_ms = flight.time_ns(rank, record.start_ns) / 1e6
    cell = Text(f"{what}\n{_place(record)}\nat {start_ms:.3f} ms, ", overflow="fold")
    return cell.append_text(_took(record))


def _took(record: Record) -> Text:
    if record.state is State.STARTED:
        return Text("running" if not record.async_op else "not waited for", "yellow")
    milliseconds = f"{(record.end_ns - record.start_ns) / 1e6:.3g} ms"
    if record.state is State.FAILED:
        return Text(f"{record.error} after {milliseconds}", "red")
    return Text(milliseconds)


def _place(record: Record) -> str:
    return f"{Path(record.file).name}:{record.line}" if record.file else "(unknown place)"


def _print_late_ranks(console: Console, findings: FlightFindings) -> None:
    heads = ("group", "rank", "comes last", "late on average", "at most", "at")
    table = _table("Late ranks", *heads)
    for a in findings.arrivals:
        table.add_row(
            Text(a.group),
            str(a.rank),
            f"{a.num_last} of {a.num_calls}",
            f"{a.mean_late_s * 1e3:.3g} ms",
            f"{a.max_late_s * 1e3:.3g} ms",
            Text(f"{a.worst.op} #{a.worst.seq}, {_place(a.worst)}"),
        )
    if table.rows:
        console.print(table)


def _print_calls(console: Console, flight: Flight) -> None:
    heads = ("caller", "callee", "function", "calls", "mean", "at most")
    table = _table("Remote calls", *heads)
    for each in calls(flight)[:_MOST_CALLS]:
        table.add_row(
            str(each.caller),
            str(each.callee),
            Text(each.function),
            f"{each.num_calls}" + (f", {each.num_running} under way" if each.num_running else ""),
            f"{each.mean_ms:.3g} ms",
            f"{each.max_ms:.3g} ms",
        )
    if table.rows:
        console.print(table)


def _table(title: str, *heads: str) -> Table:
    table = Table(title=Text(title) if title else None, title_justify="left")
    for head in heads:
        table.add_column(Text(head), overflow="fold")
    return table


def _as_json(flight: Flight, findings: FlightFindings) -> dict[str, Any]:
    names = ("differences", "absences", "waits", "failures", "arrivals")
    found: dict[str, Any] = {name: getattr(findings, name) for name in names}
    found |= {"sentences": findings.sentences, "calls": calls(flight)}
    found |= {"absent": flight.absent, "problems": flight.problems}
    found["ranks"] = {
        rank: {"host": file.host, "pid": file.pid, "reason": file.reason}
        for rank, file in flight.ranks.items()
    }
    return msgspec.to_builtins(found, str_keys=True)

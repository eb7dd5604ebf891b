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
from dure.schedules import draw_svg
from dure.trace.calls import calls
from dure.trace.events import State
from dure.trace.findings import Findings, GroupView, describe, study
from dure.trace.merging import Flight, read, read_file
from dure.trace.pipeline_steps import MeasuredStep, measured_step
from dure.trace.record import Record
from dure.trace.timeline import timeline

_MAX_COLUMNS = 8
_LONGEST_REASON = 200
_MOST_CALLS = 20

commands = typer.Typer(no_args_is_help=True)


@commands.command(
    help="Compare the records of all ranks: what they did last, and what did not match."
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
    last: Annotated[int, typer.Option(help="How many operations of each group to show.")] = 10,
) -> None:
    """Read the files of all ranks in `folder`, compare them, and show what was found."""
    flight = read(folder)
    findings = study(flight)
    if output is not None:
        _write(output, timeline(flight, findings.groups))
    if as_json:
        print(json.dumps(_as_json(flight, findings), indent=1))
        return
    console = Console()
    _print_merged(console, flight, findings, last)
    step = measured_step(flight)
    if step is not None:
        _print_step(console, step, output)
    if output is not None:
        console.print(f"Timeline: {output} (open it in ui.perfetto.dev, or chrome://tracing)")


def print_merged(console: Console, folder: Path, last: int = 10) -> None:
    """Print the records of all ranks in `folder` side by side, and what did not match."""
    flight = read(folder)
    _print_merged(console, flight, study(flight), last)


def _print_merged(console: Console, flight: Flight, findings: Findings, last: int) -> None:
    for problem in flight.problems:
        console.print(Text(f"left out: {problem}", "yellow"))
    for group in findings.groups:
        if group.numbers:
            console.print(_side_by_side(flight, findings, group, last))
    _print_findings(console, flight, findings)


def _print_step(console: Console, step: MeasuredStep, output: Path | None) -> None:
    """Compare a pipeline's step with the simulation of its schedule; draw both."""
    table = Table("pipeline", "step", "bubble")
    for name, each in (("measured", step.measured), ("simulated", step.simulated)):
        table.add_row(name, f"{each.step_time:.4g} ms", f"{each.bubble:.1%}")
    console.print(f"Pipeline of group {step.group!r}, step {step.number}:")
    console.print(table)
    if output is not None:
        for name, each in (("measured", step.measured), ("simulated", step.simulated)):
            picture = output.with_suffix(f".{name}.svg")
            picture.write_text(draw_svg(each))
            console.print(f"Picture: {picture}")


@commands.command(help="Show one rank's last operations, and where its threads were.")
def show(
    file: Annotated[Path, typer.Argument(help="A rank's file, such as rank0.json.")],
    last: Annotated[int, typer.Option(help="How many operations to show.")] = 20,
) -> None:
    """Print the last operations of one rank, oldest first, then the stacks of its threads."""
    rank = read_file(file)
    console = Console()
    console.print(
        Text(f"rank {rank.rank} of {rank.world_size}, {rank.host}, pid {rank.pid}: {rank.reason}")
    )
    table = Table("group", "operation", "took", "called at")
    for record in rank.records[-last:]:
        table.add_row(Text(record.group), Text(describe(record)), _took(record), Text(record.site))
    console.print(table)
    for thread in rank.threads:
        console.print(Text(f"{thread.name}:", "bold"))
        for frame in thread.stack:
            console.print(Text(f"  {frame}"))


def _write(path: Path, content: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(content))
    except OSError as error:
        raise UsageError(f"{path} cannot be written", seen=str(error)) from None


def _took(record: Record) -> Text:
    if record.state is State.STARTED:
        return Text("running" if not record.async_op else "not waited for", "yellow")
    milliseconds = f"{(record.end_ns - record.start_ns) / 1e6:.3g} ms"
    if record.state is State.FAILED:
        return Text(f"{record.error} after {milliseconds}", "red")
    return Text(milliseconds)


def _side_by_side(flight: Flight, findings: Findings, group: GroupView, last: int) -> Table:
    """Make a table of the group's last collectives: one row per number, one column per rank."""
    difference = next((d for d in findings.differences if d.group == group.name), None)
    numbers = group.numbers[-last:]
    if difference is not None and difference.seq not in numbers:
        numbers = [difference.seq, *numbers]
    ranks = _columns(findings, group)
    left_out = len(group.members) - len(ranks)
    also = f", {left_out} more ranks not shown" if left_out else ""
    table = Table(title=Text(f"group {group.name}{also}"), title_justify="left", show_lines=True)
    table.add_column("#", justify="right")
    for rank in ranks:
        table.add_column(Text(f"rank {rank}"), overflow="fold")
    for seq in numbers:
        odd = difference is not None and seq == difference.seq
        table.add_row(
            Text(f"{'> ' if odd else ''}{seq}", "bold red" if odd else ""),
            *(_cell(flight, group, rank, seq) for rank in ranks),
        )
    return table


def _columns(findings: Findings, group: GroupView) -> list[int]:
    """Choose the ranks to show if there are too many: those with findings first."""
    absent = [a.rank for a in findings.absences if a.group == group.name]
    late = sorted(
        (a for a in findings.arrivals if a.group == group.name), key=lambda a: -a.num_last
    )
    wanted = dict.fromkeys([*absent, *(a.rank for a in late), *group.members])
    return sorted(list(wanted)[:_MAX_COLUMNS])


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
    cell = Text(f"{what}\n{_short(record)}\nat {start_ms:.3f} ms, ", overflow="fold")
    return cell.append_text(_took(record))


def _short(record: Record) -> str:
    return f"{Path(record.file).name}:{record.line}" if record.file else "(unknown place)"


def _print_findings(console: Console, flight: Flight, findings: Findings) -> None:
    for rank, file in flight.ranks.items():
        reason = textwrap.shorten(file.reason, _LONGEST_REASON)
        console.print(Text(f"rank {rank} ({file.host}, pid {file.pid}) wrote: {reason}"))
    mentioned = {absence.rank for absence in findings.absences}
    for rank in set(flight.absent) - mentioned:
        console.print(Text(f"rank {rank} left no file", "yellow"))
    for record in findings.failures:
        text = f"rank {record.global_rank}: {describe(record)} of group {record.group!r} failed"
        console.print(
            Text(f"{text} with {record.error}" + (f" at {record.site}" * bool(record.file)))
        )
    for sentence in findings.sentences:
        console.print(Text(sentence, "bold red"))
    crashed = any(file.failure for file in flight.ranks.values())
    if not findings.sentences and not findings.failures and not crashed:
        console.print(Text("The ranks' operations match.", "green"))
    _print_arrivals(console, findings)
    _print_calls(console, flight)


def _print_calls(console: Console, flight: Flight) -> None:
    found = calls(flight)
    if not found:
        return
    table = Table("caller", "callee", "function", "calls", "mean", "at most", "queued")
    table.title, table.title_justify = "Remote calls", "left"
    for each in found[:_MOST_CALLS]:
        queued = "" if each.queued_ms is None else f"{each.queued_ms:.3g} ms"
        under_way = f", {each.num_running} under way" if each.num_running else ""
        table.add_row(
            str(each.caller),
            str(each.callee),
            Text(each.function),
            f"{each.num_calls}{under_way}",
            f"{each.mean_ms:.3g} ms",
            f"{each.max_ms:.3g} ms",
            queued,
        )
    console.print(table)


def _print_arrivals(console: Console, findings: Findings) -> None:
    if not findings.arrivals:
        return
    table = Table("group", "rank", "comes last", "late on average", "at most", "at")
    table.title, table.title_justify = "Late ranks", "left"
    for a in findings.arrivals:
        table.add_row(
            Text(a.group),
            str(a.rank),
            f"{a.num_last} of {a.num_calls}",
            f"{a.mean_late_s * 1e3:.3g} ms",
            f"{a.max_late_s * 1e3:.3g} ms",
            Text(f"{a.worst.op} #{a.worst.seq}, {_short(a.worst)}"),
        )
    console.print(table)


def _as_json(flight: Flight, findings: Findings) -> dict[str, Any]:
    return {
        "ranks": {
            str(r): {"host": f.host, "pid": f.pid, "reason": f.reason}
            for r, f in flight.ranks.items()
        },
        "absent": list(flight.absent),
        "problems": list(flight.problems),
        "differences": [_plain(d) | {"text": str(d)} for d in findings.differences],
        "absences": [_plain(a) | {"text": str(a)} for a in findings.absences],
        "waits": [_plain(w) | {"text": str(w)} for w in findings.waits],
        "failures": [_plain(f) for f in findings.failures],
        "arrivals": [_plain(a) for a in findings.arrivals],
        "calls": [_plain(each) for each in calls(flight)],
    }


def _plain(value: object) -> Any:
    return msgspec.to_builtins(value, str_keys=True)

"""`dure plan layouts`: which layout suits a training job on a machine; options in, a table out."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dure.cli.plan_explain import write_terms
from dure.errors import UsageError
from dure.plan import Job, Machine, Model, Plan, Row, configured_model, find_gpu, find_model
from dure.plan import plan as plan_layouts
from dure.plan.advice import code, command
from dure.plan.jobs import PRECISIONS
from dure.plan.layouts import Layout
from dure.plan.planning import usable

__all__ = ["layouts", "show"]

_OP = "plan layouts"
_ROWS = 15
_USUAL_BATCH, _USUAL_BATCH_OF_A_CPU = 4 << 20, 64 << 10  # tokens
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "ki": 2**10, "mi": 2**20}
_NARROWEST = 16  # columns of layouts
_LEAST = 0.005  # of a step: shares below are shown as "-"
_TOO_LARGE = 3  # layouts that are listed
_FURTHEST = 2.5  # times a GPU's memory: layouts that take more are not listed
_PARTS = {
    "compute": ("products", "attention", "elementwise", "ends"),
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "messages": ("messages",),
    "bubble": ("bubble",),
    "optimizer": ("optimizer",),
    "host": ("launches",),
}
"""Where the time of a step goes, as it is shown, with the terms that each adds up."""

_of_model = partial(typer.Option, rich_help_panel="The model")
_of_job = partial(typer.Option, rich_help_panel="How it is trained")
_of_machine = partial(typer.Option, rich_help_panel="The machine")
_of_answer = partial(typer.Option, rich_help_panel="The answer")


def layouts(
    model: Annotated[
        str, _of_model(help="By name, such as llama3-8b, or by sizes: layers=32,width=4096,...")
    ] = "",
    config: Annotated[Path | None, _of_model(help="Or its config.json (Hugging Face).")] = None,
    seq: Annotated[int | None, _of_model(help="Tokens of a sequence, if others.", min=1)] = None,
    batch_tokens: Annotated[
        str,
        _of_job(
            help="Of a step, over all ranks: 512k, 4Mi (k, M: 10^3, 10^6; Ki, Mi: 2^10, 2^20). By "
            "default some 4Mi, a sequence for each GPU or more; 64Ki for ranks on a CPU."
        ),
    ] = "",
    precision: Annotated[
        str, _of_job(help=f"{', '.join(PRECISIONS)}; by default bf16, fp32 on a CPU.")
    ] = "",
    compile_: Annotated[
        bool, _of_job("--compile", help="Layers are compiled (torch.compile).")
    ] = False,
    gpu: Annotated[str, _of_machine(help="A GPU by name, such as h100, a100-p4de, h200.")] = "",
    nodes: Annotated[int, _of_machine(help="How many nodes.")] = 1,
    gpus_per_node: Annotated[
        int | None, _of_machine(help="In each; by default as usual. With --here: ranks, 2.")
    ] = None,
    here: Annotated[
        bool, _of_machine("--here", help="This machine, measured in 30 s and kept for a day;")
    ] = False,
    measure: Annotated[bool, _of_machine("--measure", help="measured again.")] = False,
    machines: Annotated[
        Path | None, _of_machine(help="A file with figures of custom GPUs (docs/plan.md).")
    ] = None,
    memory: Annotated[
        float | None,
        _of_machine(help="GB (10^9 bytes) of a GPU that has another memory.", min=0.5, max=2000),
    ] = None,
    everything: Annotated[
        bool, _of_answer("--all", help="Show every layout that fits, not only the table's.")
    ] = False,
    explain: Annotated[
        str, _of_answer(help="Every term of a layout: a row's number, or fsdp=8,tp=2,mb=1.")
    ] = "",
    as_json: Annotated[bool, _of_answer("--json", help="Print JSON instead.")] = False,
) -> None:
    """Print the layouts of a job on a machine by predicted speed, with reasons."""
    shape = _model(model, config)
    shape = shape if seq is None else replace(shape, length=seq)
    if here or measure:
        if gpu or machines or nodes != 1:
            raise UsageError(
                "--here is this machine", op=_OP, fix="Leave out --gpu, --machines and --nodes."
            )
        from dure.cli.here import here as measured_here  # lazy: needs Linux

        machine = measured_here(gpus_per_node or 2, again=measure)
    elif gpu:
        found_gpu = find_gpu(gpu, *([machines] if machines else []))
        usual = found_gpu.gpus_per_node
        machine = Machine(found_gpu, nodes, usual if gpus_per_node is None else gpus_per_node)
    else:
        raise UsageError(
            "a machine is needed", op=_OP, fix="Give --gpu NAME (and --nodes), or --here."
        )
    if memory is not None:
        machine = machine.with_(memory_gb=memory)
    job = _job(shape, machine, batch_tokens, precision, compile_)
    if explain:
        write_terms(job, machine, _explained(explain, job, machine, everything), as_json=as_json)
        return
    found = plan_layouts(job, machine, everything=everything)
    title = _title(found, model or (str(config) if config else "a model"))
    if as_json:
        print(json.dumps(found.as_dict(), indent=1))
    else:
        show(Console(), found, title, everything=everything)


# --- what was asked ------------------------------------------------------------------------------


def _model(name: str, config: Path | None) -> Model:
    if bool(name) is (config is not None):
        raise UsageError(
            "the model is given twice" if name else "a model is needed",
            op=_OP,
            fix="Give --model NAME, --model layers=32,width=4096,..., or --config config.json.",
        )
    if config is not None:
        return configured_model(config)
    return Model.parse(name) if "=" in name else find_model(name)


def _job(model: Model, machine: Machine, tokens: str, precision: str, compiled: bool) -> Job:
    on_cpu = machine.gpu.kind == "cpu"
    if tokens:
        batch = _tokens(tokens)
    else:  # a power of two of sequences for each rank
        usual = _USUAL_BATCH_OF_A_CPU if on_cpu else _USUAL_BATCH
        each = max(1, usual // (model.length * machine.ranks))
        batch = (1 << (each.bit_length() - 1)) * machine.ranks * model.length
    return Job(model, batch, precision or ("fp32" if on_cpu else "bf16"), compiled)


def _tokens(text: str) -> int:
    """Read a number of tokens, such as 4194304, 4Mi or 2.5M."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(k|m|ki|mi|)", text.replace(",", "").lower())
    if match is None:
        raise UsageError(
            f"--batch-tokens must be a number of tokens, got {text!r}",
            op=_OP,
            fix="Write 4194304, or 4Mi (2^20); k and M are 10^3 and 10^6.",
        )
    return round(float(match[1]) * _UNITS[match[2]])


def _explained(text: str, job: Job, machine: Machine, everything: bool) -> Layout:
    """Return the layout that is to be explained: a row's number, or as it is printed."""
    if not text.isdecimal():
        return Layout.parse(text, job)
    rows = plan_layouts(job, machine, everything=everything, changes=False).rows
    if not 1 <= int(text) <= len(rows):
        raise UsageError(
            "the table has no such row", op=_OP, seen=f"{text}; it has 1 to {len(rows)}"
        )
    return rows[int(text) - 1].layout


# --- the table -----------------------------------------------------------------------------------


def _title(found: Plan, name: str) -> str:
    job, machine = found.job, found.machine
    model, each = job.model, machine.gpus_per_node
    nodes = f"{machine.nodes} nodes of {each}" if machine.nodes > 1 else f"{each}"
    on = f"{nodes} {machine.gpu.name}" if machine.gpu.name != "here" else f"{each} ranks here"
    compiled = ", compiled" if job.compiled else ""
    return (
        f"{name} ({model.parameters / 1e9:.3g} billion parameters, {job.precision}{compiled}) on "
        f"{on}; a step is {job.batch_tokens:,} tokens: "
        f"{job.sequences:,} sequences of {model.length:,}"
    )


def show(console: Console, found: Plan, title: str, *, everything: bool) -> None:
    """Print a plan: its table, and below it what is too large, reasons, changes, code."""
    shown = list(range(len(found.rows) if everything else min(_ROWS, len(found.rows))))
    if found.simplest not in shown:
        shown.append(found.simplest)
    console.print(Text(title))
    console.print(_table(shown, found, console.width))
    first, ties = found.rows[0], found.ties
    within = first.high / first.speed - 1
    console.print(
        Text(
            "Behind GB (of the fullest rank): shares of a step; tp, cp and dp are communication "
            f"that nothing hides. 8 of 10 measurements were within {within:.0%} of what is "
            f"predicted. Rows within 0.5 % of each other are ordered by simplicity. "
            f"{ties} of {len(found.rows)} layouts cannot be distinguished from the "
            f"first by that (~).{_simplest(found)}"
        )
    )
    parts = [f"{name} {size / 1e9:.1f}" for name, size in first.memory.items() if size]
    console.print(Text(f"GB of the first: {', '.join(parts)}."))
    room = f"{usable(found.machine) / 1e9:.3g} of {found.machine.gpu.memory_gb:g} GB"
    _section(console, f"Faster, but too large ({room} are usable):", _too_large(found))
    _section(console, "Why:", [f"{i}. {text}" for i, text in enumerate(found.reasons, 1)])
    _section(
        console,
        "Another layout is the fastest:",
        [f"{each.text}: {each.layout}, {each.speed:,.0f} tokens/s" for each in found.changes],
    )
    _section(console, "Note:", found.warnings)
    lines = code(first.layout, found.job, found.machine).splitlines()
    _section(console, f"{first.layout} in a program:", lines, verbatim=True)
    where = "The command, on each node:" if found.machine.nodes > 1 else "The command:"
    _section(console, where, [command(found.machine)], verbatim=True)


def _shares(row: Row) -> dict[str, float]:
    """Return which part of a step is spent on what, as it is shown."""
    return {
        name: sum(row.time[part] for part in parts) / row.seconds for name, parts in _PARTS.items()
    }


def _too_large(found: Plan) -> list[str]:
    """Return a sentence for each of the first layouts that do not fit."""
    first, room = found.rows[0], usable(found.machine) / 1e9
    near = [row for row in found.too_large if row.peak / 1e9 <= _FURTHEST * room]
    return [
        f"{row.layout}: {row.speed / first.speed - 1:.0%} faster; {row.peak / 1e9:.1f} GB are "
        f"{row.peak / 1e9 - room:.1f} too many"
        for row in near[:_TOO_LARGE]
    ]


def _simplest(found: Plan) -> str:
    """Name the simplest of the layouts that cannot be distinguished from the first."""
    row = found.rows[found.simplest]
    if not found.simplest:
        return ""
    slower = 1 - row.speed / found.rows[0].speed
    return f" The simplest of them is {row.layout}, row {found.simplest + 1}: {slower:.0%} slower."


def _table(shown: Sequence[int], found: Plan, width: int) -> Table:
    """Make a table that fits a width: with layouts on several lines if need be."""
    rows = [found.rows[i] for i in shown]
    cells = {"#": [f"{i + 1}{' ~' if 0 < i < found.ties else ''}" for i in shown]}
    cells["tokens/s"] = [f"{row.speed:,.0f}" for row in rows]
    cells["MFU"] = [f"{row.mfu:.0%}" for row in rows]
    cells["GB"] = [f"{row.peak / 1e9:.1f}" for row in rows]
    spent = [_shares(row) for row in rows]
    for name in _PARTS:
        if max(each[name] for each in spent) >= _LEAST:
            cells[name] = [f"{s[name]:.0%}" if s[name] >= _LEAST else "-" for s in spent]
    taken = sum(max(len(head), *map(len, each)) + 1 for head, each in cells.items())
    room = max(_NARROWEST, width - taken - 1)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for head in cells:
        table.add_column(head, justify="left" if head == "#" else "right", no_wrap=True)
        if head == "#":
            table.add_column("layout", no_wrap=True)
    for i, row in enumerate(rows):
        number, *others = [each[i] for each in cells.values()]
        lines = textwrap.wrap(str(row.layout).replace(",", ", "), room)
        table.add_row(number, Text("\n".join(lines).replace(", ", ",")), *others)
    return table


def _section(console: Console, title: str, lines: Sequence[str], *, verbatim: bool = False) -> None:
    """Print lines below a title, or nothing; verbatim: as they are to be copied, never wrapped."""
    if not lines:
        return
    console.print()
    console.print(Text(title, "bold"))
    for line in lines:
        if verbatim:
            console.print(Text(f"  {line}"), soft_wrap=True)
        else:
            console.print(Padding(Text(line), (0, 0, 0, 2), expand=False))

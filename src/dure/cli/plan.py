"""`dure plan`: what a job would take, before it is started.

`dure plan --model ...` is `dure plan layouts --model ...` (`plan_layouts`); `pipeline` and `memory`
are in this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any  # Any: click's own context, of typer's copy of it

import typer
import typer.core
from rich.console import Console
from rich.table import Table

from dure.cli.plan_layouts import layouts
from dure.errors import UsageError
from dure.plan import Memory, Mesh, Model, Training
from dure.plan import memory as plan_memory
from dure.schedules import (
    DEFAULT_TIMES,
    SCHEDULES,
    Generator,
    Schedule,
    Simulation,
    draw_svg,
    draw_text,
    find_generator,
    make_schedule,
    prove_no_deadlock,
    read_csv,
    simulate,
    write_csv,
)

__all__ = ["commands"]


class _LayoutsByDefault(typer.core.TyperGroup):
    """Options without a command's name are those of `layouts`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0].startswith("-") and args[0] not in ctx.help_option_names:
            args = ["layouts", *args]
        return super().parse_args(ctx, args)


commands = typer.Typer(
    no_args_is_help=True,
    cls=_LayoutsByDefault,
    epilog="Options alone are those of layouts: dure plan --model llama3-8b --gpu h100 --nodes 4",
)
commands.command(
    help="Which layout of a training job suits a machine: speed, memory, reasons.",
    epilog="A layout is fsdp=8,tp=2,mb=1: ranks of data parallelism by what they share (ddp: "
    "nothing; zero1: the optimizer's state; zero2: gradients too; fsdp: parameters too; hsdp: "
    "those within a node), ranks along tp, cp and pp, stages a rank (interleaved), sequences of a "
    "microbatch (mb), recompute.",
)(layouts)

_ANY_NUMBER = 2  # stages a rank, of schedules that take any number, where nothing says how many


@dataclass(frozen=True, slots=True)
class _Row:
    """A schedule beside the chosen one: what it takes, or why it does not fit."""

    name: str
    stages: int
    simulation: Simulation | None
    reason: str = ""


@commands.command(help="Compare schedules of a pipeline: step time, idle time, activations held.")
def pipeline(
    schedule: Annotated[str, typer.Option(help="A schedule, or a CSV file.")] = "1f1b",
    stages: Annotated[int | None, typer.Option(help="Stages over all ranks.")] = None,
    microbatches: Annotated[int | None, typer.Option(help="Microbatches a step.")] = None,
    ranks: Annotated[int | None, typer.Option(help="Ranks of the pipeline.")] = None,
    times: Annotated[
        str,
        typer.Option(help="Time of a stage's action: F=1,B=2,I=1,W=1; of each: F=1/1/2,B=2/2/4."),
    ] = "",
    send: Annotated[float, typer.Option(min=0, help="Time from a send to its arrival.")] = 0.0,
    csv: Annotated[Path | None, typer.Option(help="Write the schedule here.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Draw the schedule here.")] = None,
) -> None:
    """Print a table of all schedules with the chosen one marked, and a drawing if it fits."""
    chosen = _chosen(schedule, stages, microbatches, ranks)
    table = _times(times, chosen.stages)
    prove_no_deadlock(chosen)
    simulation = simulate(chosen, table, send_time=send)
    if csv is not None:
        write_csv(chosen, csv)
    if svg is not None:
        svg.write_text(draw_svg(simulation))
    console = Console()
    rows = [_Row(chosen.name, chosen.stages, simulation)]
    rows += [_beside(g, chosen, table, send) for g in SCHEDULES if g.trains]
    rows = [row for row in rows if row is rows[0] or row.name != chosen.name]
    console.print(_table(rows))
    for row in rows:
        if row.reason:
            console.print(f"{row.name} does not fit: {row.reason}", highlight=False)
    each = chosen.stages / len(chosen.ranks)
    console.print(
        f"{len(chosen.ranks)} ranks, {chosen.microbatches} microbatches. Times are those of one "
        f"stage of {chosen.name} ({each:g} a rank); activations are counted in its stages too.",
        highlight=False,
    )
    drawn = draw_text(simulation)
    if max(map(len, drawn.splitlines())) <= console.width:
        print(drawn, end="")


_Times = dict[str, list[float]]  # of each stage, by kind


def _times(text: str, stages: int) -> _Times:
    """Read `F=1,B=2`, or `F=1/1/2,B=2/2/4`; where B is not given, it is twice F."""
    given: _Times = {}
    for word in filter(None, text.split(",")):
        kind, _, value = word.partition("=")
        try:
            times = [float(each) for each in value.split("/")]
        except ValueError:
            raise UsageError(
                "--times has a kind and a number in each place",
                seen=repr(word),
                fix="Write F=1,B=2.",
            ) from None
        if kind.strip() not in DEFAULT_TIMES or not min(times) >= 0:
            raise UsageError("--times has numbers of at least 0 for F, B, I and W", seen=repr(word))
        if len(times) not in (1, stages):
            wanted = f"one number, or one for each of {stages} stages"
            raise UsageError(f"--times has {wanted}", seen=repr(word))
        given[kind.strip()] = times * (stages // len(times))
    forward = given.setdefault("F", [1.0] * stages)
    if "B" not in given and not {"I", "W"} <= set(given):
        given["B"] = [2 * time for time in forward]
    return given


def _shared_out(times: list[float], stages: int) -> list[float]:
    """Return the times of the same layers in another number of stages, each of equal length."""
    n = len(times)
    return [
        sum(
            time * max(0.0, min(i + 1, (j + 1) * n / stages) - max(i, j * n / stages))
            for i, time in enumerate(times)
        )
        for j in range(stages)
    ]


def _chosen(name: str, stages: int | None, microbatches: int | None, ranks: int | None) -> Schedule:
    if name.endswith(".csv"):
        own = read_csv(name, "compute_comms")
        for what, asked, seen in (
            ("stages", stages, own.stages),
            ("microbatches", microbatches, own.microbatches),
            ("ranks", ranks, len(own.ranks)),
        ):
            if asked not in (None, seen):
                raise UsageError(f"{name} has {seen} {what}", fix=f"Leave out --{what} {asked}.")
        return own
    generator = find_generator(name)
    if microbatches is None or stages is None:
        raise UsageError("--stages and --microbatches are needed, or a CSV file as --schedule")
    each = generator.stages_a_rank or (_ANY_NUMBER if stages % _ANY_NUMBER == 0 else 1)
    ranks = ranks if ranks is not None else max(1, stages // each)
    return make_schedule(generator.name, stages=stages, microbatches=microbatches, ranks=ranks)


def _beside(generator: Generator, chosen: Schedule, table: _Times, send: float) -> _Row:
    """Simulate another schedule of the same model: with more stages, each takes less."""
    ranks = len(chosen.ranks)
    each = generator.stages_a_rank or max(_ANY_NUMBER, chosen.stages // ranks)
    share = chosen.stages / (ranks * each)
    try:
        other = make_schedule(
            generator.name, stages=ranks * each, microbatches=chosen.microbatches, ranks=ranks
        )
    except UsageError as error:
        return _Row(generator.name, ranks * each, None, error.fix)
    times = {kind: _shared_out(each, other.stages) for kind, each in table.items()}
    found = simulate(other, times, send_time=send, activation_bytes=share)
    return _Row(generator.name, other.stages, found)


def _table(rows: list[_Row]) -> Table:
    """Order by step time; the first row is the chosen one's."""
    table = Table(box=None, pad_edge=False)
    table.add_column("schedule", no_wrap=True)
    for column in ("stages", "step time", "bubble", "peak activations"):
        table.add_column(column, justify="right", no_wrap=True)
    order = sorted(rows, key=lambda row: row.simulation.step_time if row.simulation else 1e300)
    for row in order:
        mark = "* " if row is rows[0] else "  "
        if row.simulation is None:
            table.add_row(mark + row.name, str(row.stages), "-", "-", "-")
            continue
        found = row.simulation
        peak = max(found.peak_bytes)
        table.add_row(
            mark + row.name,
            str(row.stages),
            f"{found.step_time:.4g}",
            f"{found.bubble:.1%}",
            f"{peak:.4g}",
        )
    return table


_OPTIMIZERS = {"adamw": 2, "sgd": 0, "momentum": 1}
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


@commands.command(help="Count what each rank of a mesh holds: will it fit?")
def memory(
    mesh: Annotated[str, typer.Option(help="Ranks by axis, such as pp=4,dp=2,tp=2.")] = "dp=1",
    params: Annotated[
        float | None, typer.Option(help="Parameters of a model of Llama's shape, such as 8e9.")
    ] = None,
    model: Annotated[
        str, typer.Option(help="Its sizes instead: layers=32,width=4096,length=8192, ...")
    ] = "",
    sequences: Annotated[int, typer.Option(help="In a microbatch of one rank.")] = 1,
    microbatches: Annotated[int, typer.Option(help="Microbatches a step.")] = 1,
    schedule: Annotated[str, typer.Option(help="Of the pipeline.")] = "1f1b",
    optimizer: Annotated[str, typer.Option(help="adamw, momentum or sgd.")] = "adamw",
    dtype: Annotated[str, typer.Option(help="Of parameters, gradients and state.")] = "float32",
    compute: Annotated[str, typer.Option(help="Of activations.")] = "float32",
    recompute: Annotated[bool, typer.Option(help="Layers are computed again in backward.")] = False,
    shared: Annotated[
        bool, typer.Option(help="Ranks along fsdp are of one host, and share memory.")
    ] = False,
) -> None:
    """Print a table with a row for each place along pp, and the largest total."""
    if (params is None) == (not model):
        raise UsageError("give --params, or --model with its sizes")
    sizes = Model.of_size(params) if params is not None else Model.parse(model)
    for given, known in ((optimizer, _OPTIMIZERS), (dtype, _BYTES), (compute, _BYTES)):
        if given not in known:
            raise UsageError("there is no such name", seen=given, fix=f"One of {', '.join(known)}.")
    axes = Mesh.parse(mesh)
    training = Training(
        sequences=sequences,
        microbatches=microbatches,
        schedule=schedule,
        parameter_bytes=_BYTES[dtype],
        compute_bytes=_BYTES[compute],
        state_elements=_OPTIMIZERS[optimizer],
        recompute=recompute,
        gathers=not shared,
    )
    ranks = plan_memory(sizes, axes, training)
    console = Console()
    console.print(
        f"{sizes.parameters:,} parameters: {sizes.layers} layers of width {sizes.width}, "
        f"{axes.ranks} ranks",
        highlight=False,
    )
    console.print(_memory_table(ranks))
    console.print(
        f"The fullest rank holds {max(rank.total for rank in ranks) / 2**30:.2f} GiB. Python and "
        "torch, some 0.3 GiB, come on top.",
        highlight=False,
    )


def _memory_table(ranks: list[Memory]) -> Table:
    table = Table("pp", "layers", title="GiB of each rank")
    parts = (
        "parameters",
        "gradients",
        "optimizer",
        "activations",
        "scores",
        "gathered",
        "freed",
        "total",
    )
    for part in parts:
        table.add_column(part, justify="right")
    for number, rank in enumerate(ranks):
        layers = ", ".join(f"{s.start}-{s.stop - 1}" for s in rank.stages)
        sizes = [f"{getattr(rank, part) / 2**30:.2f}" for part in parts]
        table.add_row(str(number), layers, *sizes)
    return table

"""`dure plan`: the memory and time that a job would take, before it is started.

`dure plan --model ...` is `dure plan layouts --model ...` (`plan_layouts`); `pipeline` is in this
module.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any  # Any: click's own context, of typer's copy of it

import typer
import typer.core
from rich.console import Console
from rich.table import Table

from dure.cli.plan_layouts import layouts
from dure.errors import UsageError
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

_LONGEST_TIME = 1e9
_ANY_NUMBER = 2  # stages per rank, of schedules that take any number, if nothing says how many


@commands.command(help="Compare schedules of a pipeline: step time, idle time, activations held.")
def pipeline(
    schedule: Annotated[str, typer.Option(help="A schedule, or a CSV file.")] = "1f1b",
    stages: Annotated[int | None, typer.Option(help="Stages over all ranks.")] = None,
    microbatches: Annotated[int | None, typer.Option(help="Microbatches a step.")] = None,
    ranks: Annotated[int | None, typer.Option(help="Ranks of the pipeline.")] = None,
    times: Annotated[
        str, typer.Option(help="Times of a stage: F=1,B=2,I=1,W=1; by default B is twice F.")
    ] = "F=1",
    send: Annotated[
        float, typer.Option(min=0, max=_LONGEST_TIME, help="Time from a send to its arrival.")
    ] = 0.0,
    svg: Annotated[Path | None, typer.Option(help="Draw the schedule here.")] = None,
) -> None:
    """Print a table of all schedules with the chosen one marked, and a drawing if it fits."""
    chosen = _chosen(schedule, stages, microbatches, ranks)
    costs = _times(times)
    prove_no_deadlock(chosen)
    simulation = simulate(chosen, costs, send_time=send)
    if svg is not None:
        try:
            svg.write_text(draw_svg(simulation))
        except OSError as error:
            raise UsageError(f"{svg} cannot be written", seen=str(error)) from None
    found = [(chosen.name, simulation)]
    console = Console()
    for generator in SCHEDULES:
        if not generator.trains or generator.name == chosen.name:
            continue
        try:
            found.append((generator.name, _beside(generator, chosen, costs, send)))
        except UsageError as error:
            console.print(f"{generator.name} does not fit: {error.fix}", highlight=False)
    console.print(_table(found))
    each = chosen.stages / len(chosen.ranks)
    console.print(
        f"{len(chosen.ranks)} ranks, {chosen.microbatches} microbatches. Times are those of one "
        f"stage of {chosen.name} ({each:g} a rank); activations are counted in its stages too.",
        highlight=False,
    )
    drawn = draw_text(simulation)
    if max(map(len, drawn.splitlines())) <= console.width:
        print(drawn, end="")


def _times(text: str) -> dict[str, float]:
    """Read `F=1,B=2`; if B is not given, it is twice F."""
    given = {"F": 1.0}
    for word in text.split(","):
        kind, _, value = word.partition("=")
        try:
            given[kind] = float(value)
        except ValueError:
            given[kind] = -1.0
        if kind not in DEFAULT_TIMES or not 0 <= given[kind] <= _LONGEST_TIME:
            raise UsageError(
                f"--times must have numbers from 0 to {_LONGEST_TIME:g} for F, B, I and W",
                seen=repr(word),
                fix="Write F=1,B=2.",
            )
    return given if {"I", "W"} <= set(given) else {"B": 2 * given["F"], **given}


def _chosen(name: str, stages: int | None, microbatches: int | None, ranks: int | None) -> Schedule:
    if name.endswith(".csv"):
        if (stages, microbatches, ranks) != (None, None, None):
            raise UsageError(
                f"{name} has its own stages, microbatches and ranks",
                fix="Leave out --stages, --microbatches and --ranks.",
            )
        return read_csv(name, "compute_comms")
    generator = find_generator(name)
    if microbatches is None or stages is None:
        raise UsageError("--stages and --microbatches are needed, or a CSV file as --schedule")
    each = generator.stages_a_rank or (_ANY_NUMBER if stages % _ANY_NUMBER == 0 else 1)
    ranks = ranks if ranks is not None else max(1, stages // each)
    return make_schedule(generator.name, stages=stages, microbatches=microbatches, ranks=ranks)


def _beside(
    generator: Generator, chosen: Schedule, costs: dict[str, float], send: float
) -> Simulation:
    """Simulate another schedule of the same model: with more stages, each takes less."""
    ranks = len(chosen.ranks)
    stages = ranks * (generator.stages_a_rank or max(_ANY_NUMBER, chosen.stages // ranks))
    other = make_schedule(
        generator.name, stages=stages, microbatches=chosen.microbatches, ranks=ranks
    )
    share = chosen.stages / stages
    smaller = {kind: share * cost for kind, cost in costs.items()}
    return simulate(other, smaller, send_time=send, activation_bytes=share)


def _table(found: list[tuple[str, Simulation]]) -> Table:
    """Order by step time; the first one is the chosen one's."""
    table = Table(box=None, pad_edge=False)
    table.add_column("schedule", no_wrap=True)
    for column in ("stages", "step time", "bubble", "peak activations"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, simulation in sorted(found, key=lambda each: each[1].step_time):
        table.add_row(
            f"{'* ' if simulation is found[0][1] else '  '}{name}",
            str(simulation.schedule.stages),
            f"{simulation.step_time:.4g}",
            f"{simulation.bubble:.1%}",
            f"{max(simulation.peak_bytes):.4g}",
        )
    return table

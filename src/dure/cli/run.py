"""`dure run`: start a program on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dure.errors import UsageError
from dure.launch import JobSpec, run_job

__all__ = ["run"]


def run(
    program: Annotated[list[str], typer.Argument(help="The program, then its own arguments.")],
    nproc: Annotated[
        int, typer.Option("--nproc", "-n", "--nproc-per-node", help="How many ranks to start.")
    ] = 1,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="The program is a module, as with python -m.")
    ] = False,
    no_python: Annotated[
        bool, typer.Option("--no-python", help="The program is no Python file: just start it.")
    ] = False,
    log_dir: Annotated[
        Path | None, typer.Option(help="Keep each rank's output in files here, too.")
    ] = None,
    trace_dir: Annotated[
        Path | None,
        typer.Option(help="Where ranks write their flight records, for `dure trace merge`."),
    ] = None,
    keep_going: Annotated[
        bool, typer.Option(help="A rank that fails does not end the others (see dure.shrink).")
    ] = False,
    timeout_term: Annotated[
        float | None,
        typer.Option(
            help="Seconds from SIGTERM to SIGKILL when the job must end "
            "[default: 5 after a failure, 0.6 after Ctrl-C]",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Start a program on several ranks, and exit with the first failure's code."""
    if module and no_python:
        raise UsageError("-m and --no-python exclude each other")
    spec = JobSpec(
        program=program[0],
        args=tuple(program[1:]),
        kind="module" if module else "executable" if no_python else "script",
        nproc=nproc,
        log_dir=log_dir,
        grace_s=timeout_term,
        trace_dir=trace_dir,
        keep_going=keep_going,
    )
    raise typer.Exit(run_job(spec).exit_code)

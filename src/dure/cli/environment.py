"""`dure env`: how this process was started, its rank, and the variables that decide it."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dure import env
from dure.errors import StoreError
from dure.placement import Placement, detect, set_here
from dure.store.key import key_source


def show_environment(
    as_json: Annotated[
        bool, typer.Option("--json", help="Write one JSON object, for programs.")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Also show variables that are not set.")
    ] = False,
) -> None:
    """Show what Dure finds in the environment and why, and the variables that are set."""
    environ = env.everything()
    placement = detect(environ)
    if as_json:
        print(json.dumps(_as_dictionary(placement, environ), indent=2))
        return
    rows = [("started by", str(placement.system), ""), *_roles(placement)]
    if placement.endpoint is not None:
        why = f"the port is derived from {placement.job!r}" if placement.port_derived else ""
        rows.append(("endpoint", placement.endpoint, why))
    state, source, why = _key()
    rows.append(("key", state, ", ".join(filter(None, (source, why)))))
    console = Console()
    _print_table(console, ("what", "value", "why"), rows)
    for note in placement.notes:
        console.print(Text(f"note: {note}"), soft_wrap=True)
    console.print()
    variables = [  # PATH is always set
        (name, "-" if value is None else value, meaning)
        for name, value, meaning in env.describe()
        if everything or (value is not None and name != "PATH")
    ]
    variables += [
        (name, value, "see docs/clusters.md")
        for name, value in set_here(environ).items()
        if name not in env.VARIABLES
    ]
    _print_table(console, ("variable", "value", "meaning"), variables)
    if not everything:
        console.print("Others would be read if they were set: dure env --all", style="dim")


def _print_table(
    console: Console, heads: tuple[str, ...], rows: list[tuple[str, str, str]]
) -> None:
    table = Table(box=None, pad_edge=False)
    for head in heads:
        table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def _roles(placement: Placement) -> list[tuple[str, str, str]]:
    """Return what a program started here would be, and what `dure run` would be."""
    member, slot = placement.member, placement.slot
    if member is None:
        program = ("a program", "no rank", "start it with `dure run`")
    else:
        program = ("a program", f"rank {member.rank} of {member.world_size}", "")
    if placement.unclear:
        return [program, ("dure run", "unclear", "needs --nnodes and --node-rank")]
    if slot is None:
        return [program, ("dure run", "this host alone", "")]
    why = ""
    if slot.copies > 1:
        why = f"started {slot.copies} times on this host, expected once"
    return [program, ("dure run", f"host {slot.node_rank} of {slot.nnodes}", why)]


def _key() -> tuple[str, str, str]:
    try:
        source, key = key_source()
    except StoreError as error:
        return "cannot be read", "", str(error)
    if key is None:
        return "none yet", source, "made on first use, on one host; several hosts need the same"
    return f"fingerprint {key.fingerprint}", source, "the same on every host of a job"


def _as_dictionary(placement: Placement, environ: dict[str, str]) -> dict[str, object]:
    state, source, _ = _key()
    declared = {name: value for name, value, _ in env.describe() if value is not None}
    return {
        "found": {
            **dataclasses.asdict(placement),
            "endpoint": placement.endpoint,
            "key": {"state": state, "source": source},
        },
        "variables": declared | set_here(environ),
    }

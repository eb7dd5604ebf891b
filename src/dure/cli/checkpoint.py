"""`dure checkpoint`: list, verify and compare checkpoints, and write their weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dure.errors import CheckpointError

if TYPE_CHECKING:
    from dure.checkpoint.contents import Catalog
    from dure.checkpoint.fsspec_path import AnyPath

__all__ = ["commands"]


def _folder(text: str) -> str:
    """Return a URL, or the path of a folder that exists."""
    if not _is_url(_existing(text)) and not Path(text).is_dir():
        raise typer.BadParameter(f"{text!r} is a file, not a folder")
    return text


def _existing(text: str) -> str:
    """Return a URL, or a path at which there is something."""
    if not _is_url(text) and not Path(text).exists():
        raise typer.BadParameter(f"{text!r} does not exist")
    return text


def _is_url(text: str) -> bool:
    return "://" in text


Folder = Annotated[
    str,
    typer.Argument(callback=_folder, help="The folder of a checkpoint, a path or a URL."),
]
Readable = Annotated[
    str,
    typer.Argument(
        callback=_folder,
        help="The folder of a checkpoint, or of weights, a path or a URL.",
    ),
]

_NUM_SHOWN = 20
_LONGEST_VALUE = 60

commands = typer.Typer(no_args_is_help=True)


def _read(place: str) -> tuple[AnyPath, Catalog]:
    """Return the path and the contents of a checkpoint, or else of a folder of weights."""
    from dure.checkpoint.catalog import NAME, catalog_of  # lazy: torch
    from dure.checkpoint.fsspec_path import path_of  # lazy: torch
    from dure.checkpoint.weight_reading import catalog_of_weights, has_weights  # lazy: torch

    folder = path_of(place)
    if not (folder / NAME).exists() and has_weights(folder):
        return folder, catalog_of_weights(folder)
    return folder, catalog_of(folder)


@commands.command(help="List the tensors and values of a checkpoint.")
def show(folder: Readable) -> None:
    """Print names, kinds, slices and bytes; then values."""
    (_, catalog), console = _read(folder), Console()
    table = Table(box=None, pad_edge=False)
    for column in ("tensor", "dtype", "shape", "slices", "bytes"):
        table.add_column(column, justify="right" if column in ("slices", "bytes") else "left")
    values = {name: leaf for name, leaf in catalog.leaves.items() if not catalog.kind_of(name)}
    for name, kind in sorted(catalog.kinds.items()):
        count, size = len(catalog.cut(name)), catalog.num_bytes_of(name)
        table.add_row(name, kind.dtype, str(list(kind.shape)), str(count), f"{size:,}")
    console.print(table)
    for name, leaf in sorted(values.items()):
        text = repr(leaf.value)
        cut = "..." if len(text) > _LONGEST_VALUE else ""
        console.print(Text(f"{name} = {text[:_LONGEST_VALUE]}{cut}"))
    files = len(catalog.files)
    console.print(
        f"{len(catalog.kinds)} tensors in {files} files, {catalog.num_bytes:,} bytes; "
        f"{len(values)} values"
    )


@commands.command(help="Read every byte of a checkpoint, and compare it with its checksum.")
def verify(folder: Readable) -> None:
    """Print each file that is not what was written; exit with 1 if there is one."""
    from dure.checkpoint.reading import faults  # lazy: torch

    path, catalog = _read(folder)
    if not catalog.has_sums:
        raise CheckpointError(
            "the weights cannot be verified",
            path=str(folder),
            seen=f"they have no checksums; in {folder}",
            fix="Only weights that Dure saved have checksums.",
        )
    found = faults(path, catalog)
    for fault in found:
        print(fault)
    if found:
        raise typer.Exit(1)
    print(f"complete: {len(catalog.files)} files, {catalog.num_bytes:,} bytes")


@commands.command(help="Compare two checkpoints: names, kinds, values and bytes.")
def diff(first: Folder, second: Folder) -> None:
    """Print the differences; exit with 1 if there is one."""
    from dure.checkpoint.fsspec_path import path_of  # lazy: torch
    from dure.checkpoint.reading import differences  # lazy: torch

    found = differences(path_of(first), path_of(second))
    for line in found[:_NUM_SHOWN]:
        print(line)
    if len(found) > _NUM_SHOWN:
        print(f"and {len(found) - _NUM_SHOWN} more")
    if found:
        raise typer.Exit(1)
    print("the same")


@commands.command(help="Write the weights of a checkpoint as Hugging Face stores them.")
def consolidate(
    folder: Folder,
    to: Annotated[
        Path, typer.Argument(help="The folder of weights; made if absent.", file_okay=False)
    ],
    prefix: Annotated[
        str, typer.Option(help="Take tensors whose names begin so, and leave it out of them.")
    ] = "",
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace weights in TO that another program has written."),
    ] = False,
) -> None:
    """Write complete tensors, in one process."""
    from dure.checkpoint import consolidate as write  # lazy: torch

    write(folder, to, prefix, overwrite=overwrite)
    print(f"written to {to}")


@commands.command(help="Write a checkpoint in another form.")
def convert(
    source: Annotated[
        str,
        typer.Argument(
            callback=_existing,
            help="A folder of Dure, of torch.distributed.checkpoint (.distcp) or of weights, a "
            "path or a URL; or a file of torch.save.",
        ),
    ],
    target: Annotated[
        str,
        typer.Argument(
            help="The folder or file that is written; with --to dure a path or a URL.",
        ),
    ],
    to: Annotated[
        str, typer.Option(help="dure, safetensors, torch (one file) or distcp.")
    ] = "dure",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a checkpoint at TARGET.")
    ] = False,
) -> None:
    """Convert in one process, slice by slice."""
    from dure.checkpoint.converting import FORMATS  # lazy: torch
    from dure.checkpoint.converting import convert as write  # lazy: torch

    if to not in FORMATS:
        raise typer.BadParameter(f"{to!r} is none of {', '.join(FORMATS)}", param_hint="--to")
    write(source, target, to, overwrite=overwrite)
    print(f"written to {target}")

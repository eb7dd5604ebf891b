"""Schedules as CSV files, as torch writes and reads them: a row a rank, a cell a step.

There are two formats: `compute_only` has forwards and backwards, and empty cells where a rank
idles; `compute_comms` also has transfers and actions of complete stages.
"""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Literal

from dure.errors import ScheduleError, UsageError
from dure.schedules.actions import Action, Schedule
from dure.schedules.validate import validate

__all__ = ["Format", "read_csv", "write_csv"]

Format = Literal["compute_only", "compute_comms"]
_MOST_BYTES = 64 << 20


def write_csv(schedule: Schedule, path: str | os.PathLike[str]) -> None:
    """Write a schedule; its lists say which of the formats it is.

    Args:
        schedule: The schedule.
        path: The file; an existing one is replaced.

    Example:
        ```python
        from dure import schedules

        schedule = schedules.gpipe((0, 1), microbatches=2)
        path = f"gpipe{dist.get_rank()}.csv"
        schedules.write_csv(schedule, path)
        assert Path(path).read_text().splitlines()[0].startswith("0F0,0F1")
        ```
    """
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(schedule.ranks)


def read_csv(path: str | os.PathLike[str], format: Format = "compute_only") -> Schedule:
    """Read a schedule; where stages lie, and how many microbatches there are, is taken from it.

    Args:
        path: The file.
        format: Allowed actions: forwards and backwards only, or all.

    Returns:
        A schedule with the file's name, which has been validated.

    Raises:
        UsageError: It is no such file; names row, column and cell, counted from 1.
        ScheduleError: The schedule is incomplete or wrong; names the same.

    Example:
        ```python
        again = schedules.read_csv(path)
        assert again.ranks == schedule.ranks
        ```
    """
    if format not in ("compute_only", "compute_comms"):
        raise UsageError(
            "there are two formats of schedules",
            seen=repr(format),
            fix="Take 'compute_only' or 'compute_comms'.",
        )
    try:
        with open(path, newline="", encoding="utf-8", opener=_open_plain) as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError("the file cannot be read", seen=f"{path}: {error}") from None
    cells = [[cell.strip() for cell in row] for row in rows]
    ranks = [
        [_action(path, format, row, column, cell) for column, cell in enumerate(each)]
        for row, each in enumerate(cells)
    ]
    try:
        schedule = Schedule.of_lists(ranks, Path(path).stem)
        validate(schedule)
    except ScheduleError as error:
        where = Path(path).name
        if error.rank is not None and error.index is not None:
            filled = [column for column, cell in enumerate(cells[error.rank]) if cell]
            where = _place(path, error.rank, filled[error.index])
        raise ScheduleError(
            error.what,
            rank=error.rank,
            index=error.index,
            action=error.action,
            seen=f"{where}: {error.seen}",
            fix=error.fix,
        ) from None
    return schedule


def _open_plain(path: str, flags: int) -> int:
    """Open a regular file: a pipe would be waited for, and a device may have no end."""
    size = os.stat(path).st_size
    if not Path(path).is_file() or size > _MOST_BYTES:
        raise UsageError(
            f"{Path(path).name} is not a file of a schedule",
            seen=f"not a regular file of at most {_MOST_BYTES >> 20} MiB",
        )
    return os.open(path, flags)


def _place(path: str | os.PathLike[str], row: int, column: int) -> str:
    return f"{Path(path).name}, row {row + 1}, column {column + 1}"


def _action(
    path: str | os.PathLike[str], format: Format, row: int, column: int, cell: str
) -> Action | None:
    if not cell:
        return None
    try:
        action = Action.parse(cell)
    except UsageError as error:
        raise UsageError(
            error.what, seen=f"{_place(path, row, column)}: {error.seen}", fix=error.fix
        ) from None
    if format == "compute_only" and not action.kind.is_compute:
        raise UsageError(
            "a compute_only file has forwards and backwards only",
            seen=f"{_place(path, row, column)}: {cell!r}",
            fix="Read it with format='compute_comms', or drop the cell.",
        )
    return action

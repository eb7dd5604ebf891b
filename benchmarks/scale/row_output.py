"""Row 7: what a launcher shows of many ranks, and what `dure trace merge` makes of their records.

Lines of all ranks are folded, the same on all and different ones; a job is summed up of which every
rank failed in its own way; and the records of all ranks are read, compared and printed. Half of
them missed the last collective, which is the most that there is to say.
"""

from __future__ import annotations

import io
import resource
import tempfile
from pathlib import Path

from counting import processor_time
from rich.console import Console

from dure.cli.trace import print_merged
from dure.launch.show.folding import LineFolder, Prefixes
from dure.launch.show.summary import summary
from dure.launch.spec import Crash, Exit, JobResult, RankResult
from dure.trace import files
from dure.trace.events import State
from dure.trace.record import Origin, Record

TITLE = "output of all ranks, the summary of their failures, their merged records"
RANKS = (16, 256, 1024)
LINES = 100
RECORDS = 2000  # as many as a rank keeps


def measure(ranks: int) -> dict[str, float]:
    """Fold, sum up and merge."""
    figures: dict[str, float] = {}
    with processor_time(figures, "CPU s of folding 100 lines of each"):
        shown = _folded(ranks)
    figures["bytes shown"] = shown
    result = _failed(ranks)
    with processor_time(figures, "CPU s of a summary"):
        lines = summary(result)
    figures["lines of the summary"] = len(lines)
    with tempfile.TemporaryDirectory() as name:
        figures["MB of files"] = _write_files(Path(name), ranks) / 1e6
        before_mb = _peak_mb()
        text = io.StringIO()
        with processor_time(figures, "CPU s of a merge"):
            print_merged(Console(file=text, width=200), Path(name))
        figures["MB of memory of a merge"] = _peak_mb() - before_mb
        figures["bytes printed by a merge"] = len(text.getvalue())
    return figures


def _folded(ranks: int) -> int:
    """Return the bytes that are shown of lines, of which every tenth differs from rank to rank."""
    folder, prefixes = LineFolder(range(ranks)), Prefixes(0, ranks)
    shown = 0
    for number in range(LINES):
        for rank in range(ranks):
            own = f", loss {rank}" if number % 10 == 0 else ""
            line = f"step {number}{own}".encode()
            for entry in folder.put(rank, rank, "stdout", [line], number / 10):
                shown += len(prefixes.of(entry.ranks, True)) + len(entry.text)
    return shown + sum(len(entry.text) for entry in folder.flush())


def _failed(ranks: int) -> JobResult:
    """Return a job of which half fails as rank 0 does, and half in its own way."""
    results: list[RankResult] = []
    for rank in range(ranks):
        message = f"bad sample {rank}" if rank % 2 else "bad batch"
        trace = f'Traceback\n  File "train.py", line 7, in step\nValueError: {message}'
        crash = Crash(type="ValueError", message=message, traceback=trace)
        how = Exit(code=1)
        results.append(RankResult(rank=rank, host="host", pid=100 + rank, exit=how, crash=crash))
    return JobResult(exit_code=1, ranks=tuple(results), elapsed_s=1.0, first_failure=results[0])


def _write_files(folder: Path, ranks: int) -> int:
    """Write the records of all ranks; return their bytes."""
    world = Origin(group="world", rank=0, global_ranks=tuple(range(ranks)), backend="shm")
    size = 0
    for odd in range(2):
        path = files.write(
            files.Target(folder=folder),
            rank=odd,
            groups=[world],
            records=[_record(ranks, seq) for seq in range(1, RECORDS + 1 - odd)],
            job="job",
            reason="made up",
        )
        content = path.read_bytes()
        for rank in range(odd, ranks, 2):
            number = b"%d," % rank
            own = content.replace(b'rank":0,', b'rank":' + number)
            own = own.replace(b'"rank":%d,' % odd, b'"rank":' + number, 1)
            size += (folder / f"rank{rank}.json").write_bytes(own)
    return size


def _record(ranks: int, seq: int) -> Record:
    """Return an operation of rank 0, the same as of all other ranks."""
    start = seq * 1_000_000
    return Record(
        group="world",
        op="all_reduce",
        seq=seq,
        world_size=ranks,
        dtype="float32",
        nbytes=4096,
        reduction="SUM",
        file="/home/me/train.py",
        line=31,
        function="step",
        start_ns=start,
        end_ns=start + 500_000,
        state=State.SUCCEEDED,
    )


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6

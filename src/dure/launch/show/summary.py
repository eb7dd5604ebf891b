"""The summary of a job that failed or was interrupted, after all output.

It names the rank that failed first, how, its traceback unless that is in the output above already,
and its last operation; the ranks that failed in the same way; and where each other rank was: the
error it raised because of the first, or its Python stack, and its last operation. Ranks with the
same text are named together.
"""

from __future__ import annotations

import re
import signal
import textwrap
from collections.abc import Callable
from pathlib import Path

from dure.launch.show.folding import rank_set
from dure.launch.spec import HANG, JobResult, RankResult, StackFrame, signal_name
from dure.trace.frames import user_frame

__all__ = ["summary", "where"]

_FRAME = re.compile(r'(?m)^  File "(.*)", line (\d+)(?:, in (.*))?$')
_SHOWN_BEFORE = 160  # characters of an error that the user has just seen
_HINTS: dict[int, str] = {
    signal.SIGKILL: "perhaps the kernel ran out of memory (see `dmesg`), or a user killed it",
    signal.SIGSEGV: "native code used memory that is not its own; PYTHONFAULTHANDLER=1 shows where",
    signal.SIGBUS: "a file or memory it had mapped was too small (is the disk or /dev/shm full?)",
    signal.SIGABRT: "native code gave up; its last message is in the output above",
    signal.SIGILL: "a library was built for another processor",
    signal.SIGTERM: "another process asked it to end",
}


def where(stack: tuple[StackFrame, ...]) -> str:
    """Return in one line where a stack is: the program's innermost line, and what it called.

    The program may be an installed package. A rank that starts or ends has no line of the program,
    and a line of Dure's or Python's own would mislead.
    """
    own = user_frame([frame.file for frame in stack])
    if own is None:
        return "in no line of the program (starting or ending)"
    user = stack[own]
    inner = next(frame for frame in stack if not frame.file.startswith("<"))  # not the importer
    if user is inner:
        return str(user)
    return f"{user} (inside {inner.function}, {Path(inner.file).name}:{inner.line})"


def summary(
    result: JobResult,
    shown: Callable[[int, str], bool] = lambda rank, text: False,
    limit: int = 32,
) -> list[str]:
    """Return the lines that say why the job ended; none if there is nothing to report.

    Args:
        result: The result of the job.
        shown: Whether a rank has just written a text that the user could see.
        limit: The most lines about other ranks.
    """
    if result.first_failure is not None:
        return _failure(result, result.first_failure, shown, limit)
    if result.interrupted_by is not None:
        return _interruption(result, result.interrupted_by)
    if not result.outlived:
        return []
    names = ", ".join(f"{command} (pid {pid})" for pid, command in result.outlived)
    return [f"ended what the ranks had left running: {names}"]


def _failure(
    result: JobResult, failure: RankResult, shown: Callable[[int, str], bool], limit: int
) -> list[str]:
    lines = [
        f"rank {failure.rank} on {failure.host} (pid {failure.pid}) failed first: {_how(failure)}"
    ]
    if failure.crash is not None:
        lines += _traceback(failure.rank, failure.crash.traceback, shown)
    lines += [f"  {what}" for what in _doing(failure)]
    others = [rank for rank in result.ranks if not rank.is_process_of(failure)]
    similar = [_is_alike(rank, failure) for rank in others]
    same = [rank for rank, is_similar in zip(others, similar, strict=True) if is_similar]
    if same:
        lines.append(f"{_ranks(same)} failed in the same way")
    others = [rank for rank, is_similar in zip(others, similar, strict=True) if not is_similar]
    if others:
        replaced = any(rank.rank == failure.rank for rank in others)
        then = "it was replaced" if replaced else "the others continued without it"
        lines.append(f"{then}, and the job succeeded:" if result.ok else "where the others were:")
    return lines + _others(others, limit, failure)


def _traceback(rank: int, traceback: str, shown: Callable[[int, str], bool]) -> list[str]:
    text = traceback.rstrip().splitlines()
    if not shown(rank, traceback):
        return ["  | " + line for line in text]
    seen = textwrap.shorten(_last_words(traceback), _SHOWN_BEFORE, placeholder=" ...")
    return [f"  {seen}", "  (its traceback is in the output above)"]


def _doing(rank: RankResult) -> list[str]:
    found = [f"its last operation: {rank.last}"] if rank.last not in ("", "none") else []
    return found + ([f"it had come to {rank.progress}"] if rank.progress else [])


def _is_alike(rank: RankResult, failure: RankResult) -> bool:
    """Whether a rank failed by itself just as the first did: at the same lines, in the same way."""
    if rank.crash is None or failure.crash is None:
        own = not (rank.exit.ok or rank.ended_by_launcher)
        return own and rank.crash is failure.crash and rank.exit == failure.exit
    mine, first = (_general(r, r.crash.traceback if r.crash else "") for r in (rank, failure))
    return rank.crash.peer is None and mine == first


def _general(rank: RankResult, text: str) -> str:
    """Remove a rank's own number from a text, so that texts of several ranks can be compared."""
    return re.sub(rf"\b(rank:? ){rank.rank}\b", r"\1*", text, flags=re.IGNORECASE)


def _ranks(ranks: list[RankResult]) -> str:
    one = len(ranks) == 1
    numbers = rank_set(rank.rank for rank in ranks)
    return f"rank {numbers} (pid {ranks[0].pid})" if one else f"ranks {numbers}"


def _others(ranks: list[RankResult], limit: int, failure: RankResult) -> list[str]:
    """Return where ranks were, those with the same text together."""
    groups: dict[tuple[str, ...], list[RankResult]] = {}
    texts: dict[tuple[str, ...], list[str]] = {}
    for rank in ranks:
        text = [_where_was(rank, failure), *([] if _ended_well(rank) else _doing(rank))]
        key = tuple(_general(rank, re.sub(r"[\d.e-]+ s earlier", "", part)) for part in text)
        groups.setdefault(key, []).append(rank)
        texts.setdefault(key, text)
    lines: list[str] = []
    for key, members in groups.items():
        first, *more = texts[key]
        lines += [f"  {_ranks(members)}: {first}", *(f"    {text}" for text in more)]
    if len(lines) > limit:
        lines[limit:] = [f"  ... and {len(lines) - limit} more lines (see job.json of --log-dir)"]
    return lines


def _interruption(result: JobResult, number: int) -> list[str]:
    if number == signal.SIGPIPE:  # the launcher has said why
        return ["all ranks were ended"]
    lines = [f"{signal_name(number)}: all ranks were ended"]
    with_stack = [rank for rank in result.ranks if rank.stack]
    return lines + [
        f"  rank {rank.rank} (pid {rank.pid}): {where(rank.stack)}" for rank in with_stack
    ]


def _how(rank: RankResult) -> str:
    if rank.crash is not None and rank.crash.type == HANG:
        return f"it hung ({rank.crash.message})"
    raised = rank.crash is not None and rank.crash.type not in ("SystemExit", "error")
    if rank.crash is not None and (rank.ended_by_launcher or (raised and not rank.exit.signal)):
        return f"it raised {rank.crash.type}"
    hint = _HINTS.get(rank.exit.signal or 0)
    return f"{rank.exit}{f' ({hint})' if hint else ''}"


def _last_words(traceback: str) -> str:
    """Return the line of a traceback that names the error; notes may follow it."""
    lines = traceback.rstrip().splitlines()
    frames = [i for i, line in enumerate(lines) if line.startswith(" ")]
    return lines[min(frames[-1] + 1, len(lines) - 1)] if frames else lines[-1]


def _where_was(rank: RankResult, failure: RankResult) -> str:
    """Describe in one line what became of a rank that did not fail first."""
    if rank.crash is not None:
        error = _last_words(rank.crash.traceback)
        first = "" if failure.crash is None else _last_words(failure.crash.traceback)
        frames = _FRAME.findall(rank.crash.traceback)
        if frames and _general(rank, error) == _general(failure, first):
            file, line, function = frames[-1]
            return f"raised the same {rank.crash.type}, at {file}:{line} in {function}"
        return f"failed as well: {error}"
    if rank.finished and (rank.ended_by_launcher or rank.exit.signal == signal.SIGTERM):
        return "had finished its program"
    if _ended_well(rank):
        return f"ended with {rank.exit}"
    if rank.stack:
        return where(rank.stack)
    if rank.ended_by_launcher:
        return "did not answer (starting, ending, or not a Python program)"
    return f"had ended: {rank.exit}"


def _ended_well(rank: RankResult) -> bool:
    """Whether a rank has succeeded, so that what it did when it was last asked says nothing."""
    return rank.crash is None and rank.exit.ok and not rank.ended_by_launcher

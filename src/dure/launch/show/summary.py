"""The summary of a job that failed or was interrupted: what the user reads last.

It tells the rank that failed first, how, its traceback unless that stands in the output above
already, and what it did last; which ranks failed in the same way; and of each other rank where it
was: the error it raised because of the first, or its Python stack, and its last operation. Ranks of
which the same is to be said are named together.
"""

from __future__ import annotations

import re
import signal
import textwrap
from collections.abc import Callable
from pathlib import Path

from dure.launch.show.folding import rank_set, say_alike
from dure.launch.spec import Exit, Frame, JobResult, RankResult, signal_name
from dure.trace.frames import is_library

__all__ = ["summary", "where"]

_FRAME = re.compile(r'(?m)^  File "(.*)", line (\d+)(?:, in (.*))?$')
_SHOWN_BEFORE = 160  # characters of an error that the user has just seen
_HINTS = {
    signal.SIGKILL: "perhaps the kernel ran out of memory (see `dmesg`), or somebody killed it",
    signal.SIGSEGV: "native code touched memory not its own; set PYTHONFAULTHANDLER=1 to see where",
    signal.SIGBUS: "a file or memory it had mapped was too small (is the disk or /dev/shm full?)",
    signal.SIGABRT: "native code gave up; its last words are in the output above",
    signal.SIGILL: "a library was built for another processor",
    signal.SIGFPE: "native code divided by zero",
    signal.SIGXCPU: "its limit of processor time is used up (see `ulimit -t`)",
    signal.SIGTERM: "somebody asked it to end",
}


def _never(rank: int, text: str) -> bool:
    del rank, text
    return False


def where(stack: tuple[Frame, ...]) -> str:
    """Say in one line where a stack is: the innermost line of the user's, and what it called."""
    if not stack:
        return "in no Python code"
    inner = stack[0]
    user = next((frame for frame in stack if not is_library(frame.file)), inner)
    if user is inner:
        return str(user)
    return f"{user} (inside {inner.function}, {Path(inner.file).name}:{inner.line})"


def summary(
    result: JobResult, shown: Callable[[int, str], bool] = _never, limit: int = 32
) -> list[str]:
    """Return the lines that tell the user why the job ended; none if there is nothing to tell.

    Args:
        result: What became of the job.
        shown: Tells whether a rank has just written a text that the user could see.
        limit: How many lines about other ranks to give at most.
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
        lines += [f"  {failure.crash.hint}"] if failure.crash.hint else []
    lines += [f"  {what}" for what in _doing(failure)]
    others = [rank for rank in result.ranks if not rank.is_process_of(failure)]
    alike = [rank for rank in others if _is_alike(rank, failure)]
    if alike:
        lines.append(f"{_ranks(alike)} failed in the same way")
    others = [rank for rank in others if rank not in alike]
    if others:
        replaced = any(rank.rank == failure.rank for rank in others)
        fate = "it was replaced" if replaced else "the others went on without it"
        lines.append(f"{fate}, and the job succeeded:" if result.ok else "where the others were:")
    return lines + _fates(others, limit, failure)


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
    """Take a rank's own number out of a text, so that those of several can be compared."""
    return re.sub(rf"\b(rank:? ){rank.rank}\b", r"\1*", text, flags=re.IGNORECASE)


def _ranks(ranks: list[RankResult]) -> str:
    one = len(ranks) == 1
    numbers = rank_set(rank.rank for rank in ranks)
    return f"rank {numbers} (pid {ranks[0].pid})" if one else f"ranks {numbers}"


def _fates(ranks: list[RankResult], limit: int, failure: RankResult) -> list[str]:
    """Say where ranks were, those together of which the same is to be said."""
    groups: dict[tuple[str, ...], list[RankResult]] = {}
    texts: dict[tuple[str, ...], list[str]] = {}
    for rank in ranks:
        text = [_fate(rank, failure), *_doing(rank)]
        key = tuple(_general(rank, re.sub(r"[\d.e-]+ s earlier", "", part)) for part in text)
        groups.setdefault(key, []).append(rank)
        texts.setdefault(key, text)
    lines: list[str] = []
    for key, members in groups.items():
        first, *more = texts[key]
        lines += [f"  {_ranks(members)}: {first}", *(f"    {text}" for text in more)]
    if len(lines) > limit:
        lines[limit:] = [f"  ... and {len(lines) - limit} lines more (see job.json of --log-dir)"]
    return lines


def _interruption(result: JobResult, number: int) -> list[str]:
    if number == signal.SIGPIPE:  # the launcher has said why
        return ["all ranks were ended"]
    lines = [f"{signal_name(number)}: all ranks were ended"]
    told = [rank for rank in result.ranks if rank.stack]
    return lines + [f"  rank {rank.rank} (pid {rank.pid}): {where(rank.stack)}" for rank in told]


def _how(rank: RankResult) -> str:
    told = rank.crash is not None and rank.crash.type not in ("SystemExit", "error")
    if rank.crash is not None and (rank.ended_by_launcher or (told and not rank.exit.signal)):
        return f"it raised {rank.crash.type}"
    hint = _hint(rank.exit)
    return f"{rank.exit}{f' ({hint})' if hint else ''}"


def _hint(exit: Exit) -> str:
    return _HINTS.get(signal.Signals(exit.signal), "") if exit.signal in set(signal.Signals) else ""


def _last_words(traceback: str) -> str:
    """Return the line of a traceback that names the error; notes may follow it."""
    lines = traceback.rstrip().splitlines()
    frames = [i for i, line in enumerate(lines) if line.startswith(" ")]
    return lines[min(frames[-1] + 1, len(lines) - 1)] if frames else lines[-1]


def _fate(rank: RankResult, failure: RankResult) -> str:
    """Describe in one line what became of a rank that did not fail first."""
    if rank.crash is not None:
        said = _last_words(rank.crash.traceback)
        first = "" if failure.crash is None else _last_words(failure.crash.traceback)
        frames = _FRAME.findall(rank.crash.traceback)
        if frames and say_alike(said, first):
            file, line, function = frames[-1]
            return f"raised the same {rank.crash.type}, at {file}:{line} in {function}"
        return f"failed as well: {said}"
    if rank.finished and rank.ended_by_launcher:
        return "had finished its program"
    if rank.stack:
        return where(rank.stack)
    if rank.ended_by_launcher:
        return "did not say (starting, ending, or not a Python program)"
    return f"ended with {rank.exit}" if rank.exit.ok else f"had ended: {rank.exit}"

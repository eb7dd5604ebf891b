"""What a rank told of its end, and the summary that the user reads.

A rank's report pipe carries two kinds of text, which `ReportReader` tells apart line by line: a
crash is one line of JSON (written by `child.py`), a stack is what faulthandler prints:

    Stack (most recent call first):
      File "/home/me/train.py", line 12 in step
      File "/home/me/train.py", line 30 in <module>
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sysconfig
from pathlib import Path

import msgspec

from dure.launch.spec import Crash, Exit, Frame, JobResult, RankResult, signal_name

__all__ = ["ReportReader", "root_cause", "summary"]

_LONGEST_LINE = 1 << 18  # the bootstrap writes two texts of 8,000 characters at most
_LONGEST_NUMBER = 10
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)')
_BOOTSTRAPS = tuple(str(Path(__file__).with_name(name)) for name in ("child.py", "forking.py"))
_DURE = str(Path(__file__).parent.parent)
_LIBRARIES = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
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


class ReportReader:
    """Collects what comes from one rank's report pipe.

    The program can write there, too, and anything: what is no report is passed over, and a line
    without an end is not kept.
    """

    def __init__(self) -> None:
        self.crash: Crash | None = None
        self.stack: tuple[Frame, ...] = ()
        self.told = False  # a whole stack has come
        self._frames: list[Frame] = []
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Take bytes as they come from the pipe."""
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[:_LONGEST_LINE]
        for line in lines:
            self._line(line.decode(errors="replace"))

    def _line(self, line: str) -> None:
        if line.startswith("{"):
            with contextlib.suppress(ValueError, RecursionError, msgspec.ValidationError):
                self.crash = msgspec.convert(json.loads(line), type=Crash)
        elif line.startswith("Stack "):
            self._frames.clear()
        elif line == "  ..." or line.startswith("  <"):  # too deep, or no Python frame
            self._end_stack()
        elif match := _FRAME.fullmatch(line):
            number = match["line"]
            known = number.isdecimal() and len(number) < _LONGEST_NUMBER
            frame = Frame(match["file"], int(number) if known else 0, match["function"])
            if frame.file not in _BOOTSTRAPS:
                self._frames.append(frame)
            elif frame.function == "<module>":
                self._end_stack()

    def _end_stack(self) -> None:
        self.stack = tuple(self._frames)
        self.told = True


def root_cause(first: RankResult, ranks: tuple[RankResult, ...]) -> RankResult:
    """Follow "I lost rank p" from the failure that was seen first to the rank it blames.

    A survivor may notice a death, raise `PeerLost` and be seen to fail before the dead rank is.
    """
    seen: set[int] = set()
    failure = first
    while failure.crash is not None and failure.crash.peer is not None:
        seen.add(failure.rank)
        peer = failure.crash.peer
        blamed = next((r for r in ranks if r.rank == peer), None)
        if blamed is None or blamed.rank in seen or not _failed_itself(blamed):
            break
        failure = blamed
    return failure


def _failed_itself(rank: RankResult) -> bool:
    return rank.crash is not None or not (rank.exit.ok or rank.ended_by_launcher)


def where(stack: tuple[Frame, ...]) -> str:
    """Say in one line where a stack is: the innermost line of the user's, and what it called."""
    if not stack:
        return "in no Python code"
    inner = stack[0]
    user = next((frame for frame in stack if not _is_library(frame.file)), inner)
    if user is inner:
        return str(user)
    return f"{user} (inside {inner.function}, {Path(inner.file).name}:{inner.line})"


def _is_library(file: str) -> bool:
    return file.startswith(("<", _DURE, *_LIBRARIES))


def summary(result: JobResult) -> list[str]:
    """Return the lines that tell the user why the job ended; none if there is nothing to tell."""
    if result.first_failure is not None:
        return _failure(result, result.first_failure)
    if result.interrupted_by is not None:
        return _interruption(result, result.interrupted_by)
    if not result.outlived:
        return []
    names = ", ".join(f"{command} (pid {pid})" for pid, command in result.outlived)
    return [f"ended what the ranks had left running: {names}"]


def _failure(result: JobResult, failure: RankResult) -> list[str]:
    lines = [
        f"rank {failure.rank} on {failure.host} (pid {failure.pid}) failed first: {_how(failure)}"
    ]
    if failure.crash is not None:
        lines += ["  | " + line for line in failure.crash.traceback.rstrip().splitlines()]
    others = [rank for rank in result.ranks if rank.rank != failure.rank]
    if others:
        lines.append("where the others were:" if not result.ok else "the others went on:")
    return lines + [f"  rank {rank.rank} (pid {rank.pid}): {_fate(rank)}" for rank in others]


def _interruption(result: JobResult, number: int) -> list[str]:
    if number == signal.SIGPIPE:
        return ["nobody reads the output any more; all ranks were ended"]
    lines = [f"{signal_name(number)}: all ranks were ended"]
    told = [rank for rank in result.ranks if rank.stack]
    return lines + [f"  rank {rank.rank} (pid {rank.pid}): {where(rank.stack)}" for rank in told]


def _how(rank: RankResult) -> str:
    """Describe how a rank failed, with a hint where its signal has a usual cause."""
    if rank.ended_by_launcher and rank.crash is not None:
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


def _fate(rank: RankResult) -> str:
    """Describe in one line what became of a rank that did not fail first."""
    if rank.crash is not None:
        return f"failed as well: {_last_words(rank.crash.traceback)}"
    if rank.stack:
        return where(rank.stack)
    if rank.ended_by_launcher:
        return "did not say (starting, ending, or not a Python program)"
    return f"ended with {rank.exit}" if rank.exit.ok else f"had ended: {rank.exit}"

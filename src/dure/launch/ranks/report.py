"""The reports of ranks to the launcher, and which rank's failure explains the others'.

A rank's report pipe carries two kinds of text, which `ReportReader` separates line by line:
objects of JSON (a crash, by `child.py`; its progress and last operation, by `dure.trace.line`), and
a stack, as faulthandler prints it:

    Stack (most recent call first):
      File "/home/me/train.py", line 12 in step
      File "/home/me/train.py", line 30 in <module>
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import msgspec

from dure.launch.spec import Crash, RankResult, StackFrame

__all__ = ["ReportReader", "ReportedStep", "root_cause"]

_LONGEST_LINE = 1 << 18  # the bootstrap writes two texts of 8,000 characters at most
_LONGEST_NUMBER = 10
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)')
_BOOTSTRAP = (
    *(str(Path(__file__).with_name(name)) for name in ("child.py", "forking.py", "spawn.py")),
    "<frozen runpy>",
)


class ReportedStep(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    total: int | None = None
    values: dict[str, float | str] = {}

    def __str__(self) -> str:
        of = "" if self.total is None else f" of {self.total}"
        return f"step {self.step}{of}" + "".join(f", {k} {v}" for k, v in self.values.items())


class _Message(msgspec.Struct):
    """One line of JSON, which has one of these; see `dure.trace.line` and `child.py`."""

    crash: Crash | None = None
    progress: ReportedStep | None = None
    last: str | None = None
    answers: bool = False
    elastic: bool = False
    finished: bool = False


class ReportReader:
    """Collects what comes from one rank's report pipe.

    The program can write there, too, and anything: lines that are not reports are ignored, and a
    line without an end is not kept.
    """

    def __init__(self) -> None:
        self.crash: Crash | None = None
        self.stack: tuple[StackFrame, ...] = ()
        self.last = ""  # the last operation of its process groups
        self.step: ReportedStep | None = None  # how far the program says it has come
        self.finished = False  # the program has come to its end
        self.elastic = False  # the program has entered `dure.elastic.run`
        self.signs_of_work = 0
        self._told_stack = False
        self._tells_last = False
        self._frames: list[StackFrame] = []
        self._in_bootstrap = False  # whether a frame of the bootstrap has come already
        self._rest = b""

    @property
    def answered(self) -> bool:
        """Whether the rank has answered: its stack, and its last operation.

        If that has failed, the rank is about to print a traceback and to report its crash, which is
        the better answer.
        """
        answered = self._told_stack and (bool(self.last) or not self._tells_last)
        return answered and (self.crash is not None or "failed with" not in self.last)

    def asked(self) -> None:
        """Wait for new answers, as the rank is being asked again."""
        self._told_stack = False
        self.last = ""

    def feed(self, data: bytes) -> None:
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[:_LONGEST_LINE]
        for line in lines:
            self._line(line.decode(errors="replace"))

    def _line(self, line: str) -> None:
        if line.startswith("{"):
            with contextlib.suppress(msgspec.DecodeError, RecursionError):
                self._take(msgspec.json.decode(line, type=_Message))
        elif line.startswith("Stack "):
            self._frames.clear()
            self._in_bootstrap = False
        elif line == "  ..." or line.startswith("  <"):  # too deep, or no Python frame
            self._end_stack()
        elif match := _FRAME.fullmatch(line):
            number = match["line"]
            known = number.isdecimal() and len(number) < _LONGEST_NUMBER
            frame = StackFrame(match["file"], int(number) if known else 0, match["function"])
            if frame.file not in _BOOTSTRAP:
                self._frames.append(frame)
                return
            if frame.function == "become" and not self._in_bootstrap:
                self._frames.clear()  # the program has ended, and its bootstrap writes a record
            self._in_bootstrap = True
            if frame.function in ("<module>", "_run"):
                self._end_stack()

    def _take(self, message: _Message) -> None:
        self.crash = message.crash or self.crash
        self.step = message.progress or self.step
        if message.last is not None:
            self.last = message.last or "none"
        self._tells_last = self._tells_last or message.answers
        self.elastic = self.elastic or message.elastic
        self.signs_of_work += message.progress is not None or message.elastic
        self.finished = self.finished or message.finished

    def _end_stack(self) -> None:
        self.stack = tuple(self._frames)
        self._told_stack = True


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

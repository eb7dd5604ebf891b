"""Dure's log: one logger per package, and how DURE_LOG shows what they write.

Dure writes to loggers of Python's `logging` that are named after its packages, such as "dure.comm"
(`env.LOGGERS`):

* INFO: one line for each new process group, and one for each decision of interest to users: the
  backend and why it was chosen, the strategy of FSDP, the buckets.
* DEBUG: the same lines on the other ranks, and the times of steps.

A line that is the same on all ranks of a group is written at INFO by the group's first rank, and at
DEBUG by the others (`decided`).

If neither DURE_LOG nor TORCH_DISTRIBUTED_DEBUG is set, Dure sets no level and adds no handler: the
program's configuration of `logging` decides, and Python shows warnings on the standard error. With
them Dure sets the levels of its loggers, and one handler of the logger "dure" writes the lines to
the standard error, with the rank. It leaves out lines that a handler of the program writes to the
terminal already.

Threads:
    Everything may be called from any thread.
"""

from __future__ import annotations

import atexit
import functools
import logging
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import ParamSpec

from dure import env
from dure.errors import UsageError

__all__ = [
    "configure",
    "decided",
    "logger",
    "never_fails",
    "reports",
    "show",
    "show_debug_level",
    "size_text",
]

P = ParamSpec("P")

_BY_DEBUG_LEVEL = {"OFF": {}, "INFO": {"dure": "INFO"}, "DETAIL": {"dure": "DEBUG"}}


def _no_rank() -> int | None:
    return None


find_rank: Callable[[], int | None] = _no_rank
"""Returns the global rank of the caller, if it has one; `comm.world` sets it."""


class _Terminal(logging.Handler):
    """Writes lines to `sys.stderr`, which is looked up for each line."""

    def emit(self, record: logging.LogRecord) -> None:
        if _is_shown_by_program(record):
            return
        with suppress(OSError, ValueError, AttributeError):  # it is closed, or there is none
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()

    def format(self, record: logging.LogRecord) -> str:
        rank = find_rank()
        rank = env.text("RANK") if rank is None else rank
        who = "dure" if rank is None else f"dure rank {rank}"
        return f"[{who}] {record.levelname} {record.name}: {super().format(record)}"


def _is_shown_by_program(record: logging.LogRecord) -> bool:
    """Return whether a handler of the program writes the line to the terminal."""
    dure = logging.getLogger("dure")
    handlers = [*dure.handlers, *(logging.getLogger().handlers if dure.propagate else ())]
    return any(
        isinstance(handler, logging.StreamHandler)
        and handler.stream in (sys.stderr, sys.stdout)
        and record.levelno >= handler.level
        for handler in handlers
    )


_terminal = _Terminal()
_lock = threading.Lock()
_levels: dict[str, int] = {}
"""The levels that this module has set, by logger."""
_read: tuple[str | None, str | None] | None = None
"""The values of the variables when `configure` last ran."""
_refused: UsageError | None = None
"""Why an import did not apply the variables."""


def logger(package: str) -> logging.Logger:
    """Return the logger of a package of Dure, such as "comm".

    The first call, in an import, applies the variables. It does not raise: `configure` refuses an
    invalid value when ranks are started. A program that starts none is warned at its end.
    """
    global _refused
    if _read is None and _refused is None:
        try:
            _apply_variables()
        except UsageError as error:
            _refused = error
            atexit.register(_warn_of_refused)
    return logging.getLogger(f"dure.{package}")


def _warn_of_refused() -> None:
    if _refused is not None:
        logging.getLogger("dure").warning("%s", _refused)


def configure() -> None:
    """Apply DURE_LOG, else TORCH_DISTRIBUTED_DEBUG, if they have changed since the last call.

    Raises:
        UsageError: One of them has an invalid value.
    """
    atexit.unregister(_warn_of_refused)
    _apply_variables()


def _apply_variables() -> None:
    global _read
    read = env.text("DURE_LOG"), env.text("TORCH_DISTRIBUTED_DEBUG")
    if read == _read:
        if _levels:
            _enable()
        return
    levels = env.log_levels() or _BY_DEBUG_LEVEL[env.debug_level()]
    if _read is not None or levels:
        show(levels)
    _read = read


def _enable() -> None:
    """Enable Dure's loggers, which `logging.config` disables unless a program names them."""
    for name in ("dure", *env.LOGGERS):
        logging.getLogger(name).disabled = False


def show_debug_level(level: str) -> None:
    """Show the lines of a level of TORCH_DISTRIBUTED_DEBUG, unless DURE_LOG is set."""
    if not env.log_levels():
        show(_BY_DEBUG_LEVEL[level])


def show(levels: Mapping[str, str]) -> None:
    """Show lines on the standard error; replaces the levels of the last call.

    Args:
        levels: The lowest level that is shown, by logger.
    """
    with _lock:
        for name, level in _levels.items():
            if logging.getLogger(name).level == level:  # else the program has set it since
                logging.getLogger(name).setLevel(logging.NOTSET)
        _levels.clear()
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
            _levels[name] = logging.getLogger(name).level
        if levels:
            _enable()
            logging.getLogger("dure").addHandler(_terminal)
        else:
            logging.getLogger("dure").removeHandler(_terminal)


def reports(log: logging.Logger, rank: int) -> bool:
    """Return whether `decided` would write a line; call it before expensive lines."""
    return log.isEnabledFor(logging.DEBUG if rank else logging.INFO)


def decided(log: logging.Logger, rank: int, text: str, *values: object) -> None:
    """Write a line that is the same on all ranks: at INFO on rank 0 of the group, else at DEBUG."""
    log.log(logging.DEBUG if rank else logging.INFO, text, *values, stacklevel=2)


def never_fails(report: Callable[P, None]) -> Callable[P, None]:
    """Wrap a function that writes a line, so that an error in it is a line too.

    Only some ranks write a line. An error that ended one of them would leave the others waiting.
    """

    @functools.wraps(report)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            report(*args, **kwargs)
        except Exception:
            logging.getLogger("dure").warning("a line of the log failed", exc_info=True)

    return guarded


def size_text(num_bytes: float) -> str:
    """Return a size as a person reads it, such as 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"

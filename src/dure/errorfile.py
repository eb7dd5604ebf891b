"""The file in which a program leaves the error that ended it, for who started it to read.

torchrun names a file for each rank in TORCHELASTIC_ERROR_FILE, and torch's `@record` writes it;
`dure run` and `record` do the same in the same format, so that any pair works:

    {"message": {"message": "ValueError: too late",
                 "extraInfo": {"py_callstack": "Traceback ...", "timestamp": "1700000000"},
                 "errorCode": 3}}

The last field is there only where it is known. A file may also hold `{"message": "text"}`.

Internal: its `record` is `dure.record`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from dure import env

__all__ = ["RecordedError", "encodable", "read_error", "record", "write_error"]

_MOST_BYTES = 16 << 20
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedError:
    """What an error file tells.

    `message` begins with the error's type; `traceback` is empty where there was none, and
    `exit_code` None where it was not known yet.
    """

    message: str
    traceback: str = ""
    exit_code: int | None = None
    timestamp: int = 0

    @property
    def type(self) -> str:
        """The error's type, as far as the message shows it."""
        name, colon, _ = self.message.partition(": ")
        return name if colon and name.replace(".", "").isidentifier() else ""


def record(fn: Callable[P, T], error_handler: Any = None) -> Callable[P, T | None]:
    """Decorate a program's main function, so that what it raises is left in the error file.

    As torch's decorator of this name: the error goes on, `sys.exit(0)` becomes a return, and
    faults of native code print where they were. Without a launcher nothing is written.
    An error that carries another rank's report (`LaunchError`) leaves that rank's.

    Args:
        fn: The function.
        error_handler: Its `record_exception(error)` is called instead, as torch's ErrorHandler.
    """

    @functools.wraps(fn)
    def recorded(*args: P.args, **kwargs: P.kwargs) -> T | None:
        with contextlib.suppress(Exception):  # a standard error without a descriptor
            faulthandler.enable(all_threads=True)
        try:
            return fn(*args, **kwargs)
        except SystemExit as end:
            if end.code == 0:
                return None
            raise
        except Exception as error:
            (error_handler.record_exception if error_handler else _leave)(error)
            raise

    return recorded


def _leave(error: Exception) -> None:
    file = env.text("TORCHELASTIC_ERROR_FILE")
    if file is None:
        return
    try:
        write_error(Path(file), _told_by(error))
    except OSError as trouble:
        print(f"dure.record: {file} cannot be written: {trouble.strerror}", file=sys.stderr)


def _told_by(error: Exception) -> RecordedError:
    crash = getattr(getattr(error, "report", None), "crash", None)
    if crash is not None:
        return RecordedError(
            message=f"{crash.type}: {crash.message}",
            traceback=crash.traceback,
            exit_code=crash.exit_code,
        )
    trace = error.__traceback__.tb_next if error.__traceback__ else None  # without `recorded`
    return RecordedError(
        message=f"{type(error).__name__}: {error}",
        traceback="".join(traceback.format_exception(type(error), error, trace)),
    )


def write_error(path: Path, error: RecordedError) -> None:
    """Write an error file.

    Raises:
        OSError: It cannot be written.
    """
    extra = {
        "py_callstack": error.traceback or error.message,
        "timestamp": str(error.timestamp or int(time.time())),
    }
    content: dict[str, Any] = {"message": error.message, "extraInfo": extra}
    if error.exit_code is not None:
        content["errorCode"] = error.exit_code
    path.write_text(json.dumps({"message": content}), encoding="utf-8")


def read_error(path: Path) -> RecordedError | None:
    """Read an error file; None if there is none, or what it holds is something else."""
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return None
        content = json.loads(path.read_text(encoding="utf-8", errors="replace"))["message"]
        if isinstance(content, str):
            return RecordedError(message=encodable(content))
        extra = content.get("extraInfo", {})
        code = content.get("errorCode")
        return RecordedError(
            message=encodable(str(content["message"])),
            traceback=encodable(str(extra.get("py_callstack", ""))),
            exit_code=None if code is None else int(code),
            timestamp=int(extra.get("timestamp", 0)),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    except (OverflowError, RecursionError):  # an infinite time; nested too deeply
        return None


def encodable(text: str) -> str:
    """Return a text that can be shown and sent: half a surrogate pair as standard error shows it.

    JSON may hold them, and so do names of files that are no UTF-8.
    """
    return text.encode(errors="backslashreplace").decode()

"""The error file of a rank: the program writes its final error there, and the launcher reads it.

torchrun sets TORCHELASTIC_ERROR_FILE for each rank, and torch's `@record` writes that file.
`dure run` and `record` use the same variable and format, so that any pair works:

    {"message": {"message": "ValueError: too late",
                 "extraInfo": {"py_callstack": "Traceback ...", "timestamp": "1700000000"},
                 "errorCode": 3}}

`errorCode` is optional. A file may also be `{"message": "text"}`.

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
    """The content of an error file.

    Attributes:
        message: The error's type and message.
        traceback: The traceback; empty if there is none.
        exit_code: The exit code of the process; None if unknown.
        timestamp: Time of the error, in seconds since the epoch.
    """

    message: str
    traceback: str = ""
    exit_code: int | None = None
    timestamp: int = 0

    @property
    def type(self) -> str:
        """The error's type, if the message begins with one."""
        name, colon, _ = self.message.partition(": ")
        return name if colon and name.replace(".", "").isidentifier() else ""


def record(fn: Callable[P, T], error_handler: Any = None) -> Callable[P, T | None]:
    """Decorate a program's main function to write its exception to the launcher's error file.

    Same as torch's decorator: the exception is raised again, `sys.exit(0)` becomes a return, and a
    crash of native code prints the Python stacks. Without a launcher no file is written. For an
    error with another rank's report (`LaunchError`), that report is written.

    Args:
        fn: The main function.
        error_handler: If given, its method `record_exception(error)` is called instead of writing
            the file, as with torch's ErrorHandler.

    Returns:
        The decorated function.

    Example:
        ```python
        @dist.record
        def main() -> int:
            return 7

        assert main() == 7
        ```
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
            (error_handler.record_exception if error_handler else _write)(error)
            raise

    return recorded


def _write(error: Exception) -> None:
    file = env.text("TORCHELASTIC_ERROR_FILE")
    if file is None:
        return
    try:
        write_error(Path(file), _content_of(error))
    except OSError as trouble:
        print(f"dure.record: {file} cannot be written: {trouble.strerror}", file=sys.stderr)


def _content_of(error: Exception) -> RecordedError:
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
    """Read an error file; None if there is none, or its content is something else."""
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
    """Return the text with lone surrogates escaped, so that it can be printed and sent.

    JSON can have lone surrogates, and so can names of files that are not UTF-8.
    """
    return text.encode(errors="backslashreplace").decode()

"""`python -m dure.run` is `dure run`, as `python -m torch.distributed.run` is torchrun.

torchrun's own functions raise an error that names the replacement.
"""

from __future__ import annotations

import argparse
import signal
from typing import TYPE_CHECKING, NoReturn

from dure.cli import main as command
from dure.errors import UsageError
from dure.torch_names import lazy_names

__all__ = ["config_from_args", "get_args_parser", "main", "parse_args", "run"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__)


def main(args: list[str] | None = None) -> None:
    """Run `dure run` with these arguments, or those of the command line; return if it succeeds.

    Raises:
        SystemExit: It failed; the code is that of `dure run`.
    """
    before = signal.getsignal(signal.SIGINT)
    try:
        command("run", args=args)
    except SystemExit as end:
        if end.code:
            raise
    if signal.getsignal(signal.SIGINT) is not before:  # the command leaves it for a program's end
        signal.signal(signal.SIGINT, before)


def get_args_parser() -> NoReturn:
    """Raise UsageError."""
    raise _refusal("get_args_parser")


def parse_args(args: list[str] | None) -> NoReturn:
    """Raise UsageError."""
    raise _refusal("parse_args")


def config_from_args(args: argparse.Namespace) -> NoReturn:
    """Raise UsageError."""
    raise _refusal("config_from_args")


def run(args: argparse.Namespace) -> NoReturn:
    """Raise UsageError."""
    raise _refusal("run")


def _refusal(name: str) -> UsageError:
    return UsageError(
        f"dure.run.{name} is a part of torchrun that `dure run` does not have",
        fix="Call dure.run.main(arguments), dure.launch.run_job or dure.spawn.",
    )


if __name__ == "__main__":
    command("run")

"""`python -m dure.run` is `dure run`, as `python -m torch.distributed.run` is torchrun.

torchrun's own functions exist by name: their callers find out what to use instead.
"""

from __future__ import annotations

import argparse
from typing import NoReturn

from dure.cli import main as command
from dure.errors import UsageError
from dure.torch_names import getter

__all__ = ["config_from_args", "get_args_parser", "main", "parse_args", "run"]

__getattr__ = getter(__name__)


def main(args: list[str] | None = None) -> None:
    """Run `dure run` with these arguments, or those of the command line, and exit."""
    command("run", args=args)


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
    main()

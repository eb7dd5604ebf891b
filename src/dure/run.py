"""`python -m dure.run` is `dure run`, as `python -m torch.distributed.run` is torchrun.

The functions have torch's names, for programs that start jobs with torchrun's flags:

    args = dure.run.parse_args(["--nproc-per-node", "2", "train.py"])
    dure.run.run(args)
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dure.cli import main as command
from dure.cli.run.command import prepared_spec
from dure.cli.run.flags import run_parser
from dure.cli.run.parser import Given
from dure.cli.run.request import make_request
from dure.errors import UsageError
from dure.launch import JobSpec, run_job
from dure.launch.torch_launcher import LaunchConfig
from dure.torch_names import lazy_names

__all__ = ["config_from_args", "get_args_parser", "main", "parse_args", "run"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__)


def main(args: list[str] | None = None) -> None:
    """Run `dure run`, and return if it succeeds.

    Args:
        args: The arguments; None for those of the command line.

    Raises:
        SystemExit: The job failed; the code is that of `dure run`.

    Example:
        ```python
        from dure import run

        if dist.get_rank() == 0:  # one process starts the job
            Path("hello.py").write_text("print('hello')")
            run.main(["--standalone", "--nproc", "2", "hello.py"])
        ```
    """
    before = signal.getsignal(signal.SIGINT)
    try:
        command("run", args=args)
    except SystemExit as end:
        if end.code:
            raise
    if signal.getsignal(signal.SIGINT) is not before:  # the command leaves it for a program's end
        signal.signal(signal.SIGINT, before)


def get_args_parser() -> argparse.ArgumentParser:
    """Return a parser of the flags of `dure run`, to which a program can add others.

    Returns:
        The parser. Its result has no attributes for missing flags. Unlike `parse_args`, it does not
        accept flags with underscores or shortened flags.

    Example:
        ```python
        from dure import run

        parser = run.get_args_parser()
        assert parser.parse_args(["--nproc", "2", "train.py"]).training_script == "train.py"
        ```
    """
    parser = argparse.ArgumentParser(
        prog="dure run", parents=[run_parser().arguments], add_help=False
    )
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return parser


def parse_args(args: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line of `dure run`.

    Args:
        args: The arguments; None for those of this program.

    Returns:
        The given flags by name (`nproc`, `nnodes`, `max_restarts`, ...), and `training_script` with
        its `training_script_args`.

    Raises:
        UsageError: A flag is unknown, or its value is invalid.

    Example:
        ```python
        args = run.parse_args(["--nproc", "2", "train.py", "--lr", "0.1"])
        assert args.training_script == "train.py"
        assert args.training_script_args == ["--lr", "0.1"]
        ```
    """
    given = run_parser().parse(sys.argv[1:] if args is None else args)
    return argparse.Namespace(
        **given.values, training_script=given.program, training_script_args=list(given.args)
    )


def config_from_args(args: argparse.Namespace) -> tuple[LaunchConfig, str, list[str]]:
    """Convert parsed flags to the arguments of `elastic_launch`; drops flags unknown to torchrun.

    Args:
        args: The result of `parse_args` or of the parser of `get_args_parser`.

    Returns:
        The configuration, the program, and the program's arguments.

    Raises:
        UsageError: Flags contradict each other, or the program is missing.

    Example:
        ```python
        config, program, arguments = run.config_from_args(args)
        assert config.nproc_per_node == 2
        assert arguments[-3:] == ["train.py", "--lr", "0.1"]
        ```
    """
    spec = _spec(args)
    config = LaunchConfig(
        *(*spec.nnodes, spec.nproc),
        logs_specs=spec.log_dir,
        run_id=spec.run_id or "",
        role=spec.role,
        rdzv_endpoint=spec.endpoint or "",
        rdzv_backend="static" if spec.node_rank is not None else spec.rdzv_backend,
        rdzv_configs={"rank": spec.node_rank or 0, "timeout": spec.join_timeout_s},
        max_restarts=spec.max_restarts,
        local_addr=spec.local_addr,
        signals_to_handle=",".join(signal.Signals(number).name for number in spec.signals),
        duplicate_stdout_filters=list(spec.stdout_filters),
        duplicate_stderr_filters=list(spec.stderr_filters),
        virtual_local_rank=spec.virtual_local_rank,
        shutdown_timeout=None if spec.grace_s is None else int(spec.grace_s),
    )
    if spec.kind == "executable":
        return config, spec.program, list(spec.args)
    module = ["-m"] if spec.kind == "module" else []
    return config, sys.executable, ["-u", *module, spec.program, *spec.args]


def run(args: argparse.Namespace) -> None:
    """Run a job, and return when it has succeeded.

    Args:
        args: The result of `parse_args` or of the parser of `get_args_parser`.

    Raises:
        LaunchError: A rank failed, or the job could not be started.
        UsageError: Flags contradict each other, or one needs the command (`--hosts`, `--page`).

    Example:
        ```python
        if dist.get_rank() == 0:
            run.run(run.parse_args(["--standalone", "--nproc", "2", "hello.py"]))
        ```
    """
    run_job(_spec(args)).check()


def _spec(args: argparse.Namespace) -> JobSpec:
    values = dict(vars(args))
    program, words = values.pop("training_script", ""), values.pop("training_script_args", ())
    known = {action.dest for action in run_parser().spellings.values()}
    flags = {name: value for name, value in values.items() if name in known}
    request = make_request(Given(values=flags, program=program, args=tuple(words)))
    if request.hosts or request.hostfile or request.dry_run or request.leash or request.page:
        raise UsageError(
            "--hosts, --hostfile, --dry-run, --leash and --page are for the command",
            fix="Call dure.run.main(arguments).",
        )
    return prepared_spec(request)


if __name__ == "__main__":
    command("run")

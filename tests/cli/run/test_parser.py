"""What words and variables mean to `dure run`."""

import pytest

from dure.cli.run.flags import run_parser
from dure.cli.run.parser import Given


def test_programs_own_flags_stay_its_own() -> None:
    args = ("--nproc", "9", "--rdzv", "--", "-h")  # --rdzv is ambiguous
    given = run_parser().parse(["-n", "2", "--", "prog", *args])
    flags = (("nproc", ("-n", "2")),)
    assert given == Given(values={"nproc": 2}, program="prog", args=args, flags=flags)


@pytest.mark.parametrize(
    ("words", "start"),
    [
        (["p", "--nproc", "2"], "--nproc comes after p"),
        (["p", "--nproc_per_node=2"], "--nproc_per_node comes after p"),
        (["-n", "2", "p", "--nproc", "2"], ""),  # both: the program's own
        (["p", "--", "--nproc", "2"], ""),
        (["p", "--role", "x", "-n", "2"], ""),  # many programs have these
    ],
)
def test_a_flag_behind_the_program_is_noted(words: list[str], start: str) -> None:
    parser = run_parser()
    line = parser.misplaced(parser.parse(words))
    assert line.startswith(start) and bool(line) is bool(start)


def test_values_may_begin_with_a_dash() -> None:
    given = run_parser().parse(["--ssh-option", "-p2222", "--ssh-option=-v", "p"])
    assert given.values == {"ssh_options": ["-p2222", "-v"]}
    assert given.program == "p"

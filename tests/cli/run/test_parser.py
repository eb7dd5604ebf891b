"""What words and variables mean to `dure run`."""

from __future__ import annotations

import pytest

from dure.cli.run.flags import run_parser
from dure.cli.run.parser import Given
from dure.errors import UsageError


def test_programs_own_flags_stay_its_own() -> None:
    given = run_parser().parse(["-n", "2", "--", "prog", "--nproc", "9", "--", "-h"])
    assert given == Given(
        values={"nproc": 2},
        program="prog",
        args=("--nproc", "9", "--", "-h"),
        flags=(("nproc", ("-n", "2")),),
    )


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


def test_ambiguous_flags_behind_the_program_are_the_programs() -> None:
    assert run_parser().parse(["p", "--rdzv", "x", "--no"]).args == ("--rdzv", "x", "--no")


def test_values_may_begin_with_a_dash() -> None:
    given = run_parser().parse(["--ssh-option", "-p2222", "--ssh-option=-v", "p"])
    assert given.values == {"ssh_options": ["-p2222", "-v"]}
    assert given.program == "p"


@pytest.mark.parametrize(
    ("name", "text"),
    [("PET_STANDALONE", "yes"), ("PET_MAX_RESTARTS", "few"), ("PET_RDZV_BACKEND", "zk")],
)
def test_a_variable_with_a_wrong_value_is_named(name: str, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        run_parser().parse_variables({name: text})
    assert name in str(caught.value)


def test_an_unknown_variable_is_noted_and_not_fatal() -> None:
    variables = {"PET_NPROC": "2", "PET_SOMETHING_ELSE_ALTOGETHER": "1"}
    values, notes = run_parser().parse_variables(variables)
    assert values == {}
    assert [note for note in notes if "PET_NPROC_PER_NODE" in note] == notes
    assert len(notes) == 1

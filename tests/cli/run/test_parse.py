"""What words and variables mean to `dure run`, in which order."""

from __future__ import annotations

import pytest

from dure.cli.run.parse import Given, from_variables, misplaced, parse
from dure.errors import UsageError


def test_programs_own_flags_stay_its_own() -> None:
    given = parse(["-n", "2", "--", "prog", "--nproc", "9", "--", "-h"])
    assert given == Given(
        values={"nproc": 2},
        program="prog",
        args=("--nproc", "9", "--", "-h"),
        flags=(("nproc", ("-n", "2")),),
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["p", "--nproc", "2"], "--nproc stands behind p"),
        (["p", "--nproc_per_node=2"], "--nproc_per_node stands behind p"),
        (["-n", "2", "p", "--nproc", "2"], ""),  # both: the program's own
        (["p", "--", "--nproc", "2"], ""),
        (["p", "--role", "x", "-n", "2"], ""),  # many programs have these
    ],
)
def test_a_flag_behind_the_program_is_told(words: list[str], told: str) -> None:
    line = misplaced(parse(words))
    assert line.startswith(told) and bool(line) is bool(told)


@pytest.mark.parametrize(
    ("name", "text"),
    [("PET_STANDALONE", "yes"), ("PET_MAX_RESTARTS", "few"), ("PET_RDZV_BACKEND", "zk")],
)
def test_variable_of_no_value_is_named(name: str, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        from_variables({name: text})
    assert name in str(caught.value)


def test_variable_that_means_nothing_is_told_and_not_fatal() -> None:
    values, notes = from_variables({"PET_NPROC": "2", "PET_SOMETHING_ELSE_ALTOGETHER": "1"})
    assert values == {}
    assert [note for note in notes if "PET_NPROC_PER_NODE" in note] == notes
    assert len(notes) == 1

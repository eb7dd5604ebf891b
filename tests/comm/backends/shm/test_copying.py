"""How the engine copies: what a user sets, and how a plan reads."""

import pytest

from dure.comm.backends.shm.copying import CopyPlan, single_copies_wanted
from dure.errors import UsageError


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (None, -1),
        ("", -1),
        ("auto", -1),
        ("OFF", -2),
        ("0", 0),
        ("65536", 65536),
        ("9" * 30, 2**62),
    ],
)
def test_variable_becomes_the_engine_s_number(monkeypatch, value, wanted):
    if value is None:
        monkeypatch.delenv("DURE_SINGLE_COPY", raising=False)
    else:
        monkeypatch.setenv("DURE_SINGLE_COPY", value)
    assert single_copies_wanted() == wanted


@pytest.mark.parametrize("value", ["on", "-1", "64K", "1.5"])
def test_other_values_are_refused(monkeypatch, value):
    monkeypatch.setenv("DURE_SINGLE_COPY", value)
    with pytest.raises(UsageError):
        single_copies_wanted()


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (CopyPlan(True, True, None), "single copies where they are quicker"),
        (CopyPlan(True, False, 65536), "single copies from 65536 B on"),
        (CopyPlan(True, False, None), "no single copies (not permitted, or off)"),
        (CopyPlan(False, True, None), "no single copies (not permitted, or off)"),
    ],
)
def test_plan_reads_as_what_is_copied_once(plan, text):
    assert str(plan) == text

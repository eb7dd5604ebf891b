"""How the engine copies: what a user sets, and how a plan reads."""

from __future__ import annotations

import pytest

from dure.comm.backends.shm.copying import CopyPlan, single_copies_wanted
from dure.errors import UsageError

PLAN = CopyPlan(
    permitted=True,
    measured=True,
    line_us=0.215,
    message_bytes=65536,
    shared_bytes=None,
    block_bytes=512,
)


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


def test_plan_as_text_has_the_line_and_the_thresholds():
    text = str(PLAN)
    assert "0.21 us" in text or "0.22 us" in text
    assert "from 64 KiB" in text
    assert "never" in text
    assert "from 512 B" in text

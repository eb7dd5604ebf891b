"""How the engine copies: what a user sets, and how a plan reads."""

import pytest

from dure.comm.backends.shm.copying import single_copies_wanted
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

"""Environment variables: flags, and names that nobody knows."""

import re
from pathlib import Path

import pytest

from dure import env
from dure.errors import RendezvousError, UsageError

PAGE = Path(__file__).parent.parent / "docs/reference/environment.md"


@pytest.mark.parametrize(
    ("value", "on"),
    [
        *[("1", True), ("Yes", True), ("true", True), ("on", True)],
        *[("", False), ("0", False), ("False", False), ("no", False), ("off", False)],
    ],
)
def test_flag_is_on_or_off(monkeypatch: pytest.MonkeyPatch, value: str, on: bool) -> None:
    monkeypatch.setenv("DURE_VERIFY", value)
    assert env.flag("DURE_VERIFY") is on


@pytest.mark.parametrize("value", ["maybe", "2", "yess"])
def test_flag_that_is_no_boolean_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("DURE_VERIFY", value)
    with pytest.raises(UsageError) as caught:
        env.flag("DURE_VERIFY")
    assert "DURE_VERIFY" in caught.value.what
    with pytest.raises(UsageError):
        env.check_flags()


def test_a_whole_number_may_have_a_sign_and_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", " +12 ")
    assert env.integer("RANK") == 12


@pytest.mark.parametrize("value", ["1_0", "1.0", "0x1", "\u0661", "1 2", "-"])
def test_what_is_no_whole_number_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", value)
    with pytest.raises(RendezvousError) as caught:
        env.integer("WORLD_SIZE")
    assert "WORLD_SIZE" in caught.value.what


def test_unknown_names_are_listed_with_the_nearest_known_one() -> None:
    environ = {"DURE_BACKED": "gloo", "DURE_TRACEDIR": "x", "DURE_BACKEND": "shm", "DUREX": "1"}
    assert env.unknown(environ) == [
        ("DURE_BACKED", "DURE_BACKEND"),
        ("DURE_TRACEDIR", "DURE_TRACE_DIR"),
    ]
    note = env.unknown_note(environ)
    assert "\n" not in note
    assert "DURE_BACKED" in note
    assert "DURE_BACKEND" in note


def test_known_names_are_no_reason_for_a_note() -> None:
    assert env.unknown_note(dict.fromkeys(env.VARIABLES, "1")) == ""


def test_every_variable_of_ours_is_documented() -> None:
    page = PAGE.read_text()
    assert [n for n in env.VARIABLES if n.startswith("DURE_") and f"`{n}`" not in page] == []


def test_every_flag_that_the_sources_read_is_checked_at_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sources = (Path(__file__).parent.parent / "src/dure").rglob("*.py")
    read = {n for s in sources for n in re.findall(r'flag\("(DURE_\w+)"\)', s.read_text())}
    assert len(read) >= 4
    for name in read:
        with monkeypatch.context() as patch:
            patch.setenv(name, "maybe")
            with pytest.raises(UsageError, match=name):
                env.check_flags()

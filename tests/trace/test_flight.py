"""The flight recorder: sources, and what errors leave behind."""

import json

import pytest

from dure.errors import CommTimeout, Desync, PeerLost, UsageError
from dure.trace import dump, flight, recorded
from tests.trace.made_up import ring_of

pytestmark = pytest.mark.usefixtures("recorder")


def test_a_source_nobody_holds_is_gone():
    ring_of(num_ops=1)
    assert recorded() == []


@pytest.mark.parametrize("kind", [Desync, PeerLost, CommTimeout])
def test_an_error_of_other_ranks_is_followed_by_one_dump_and_a_note(kind, folder):
    ring = ring_of(num_ops=1)
    first, second = kind("x", group="g"), kind("y", group="g")
    flight.on_error(first)
    path = folder / "rank3.json"
    assert json.loads(path.read_text())["reason"].startswith(kind.__name__)
    path.unlink()
    flight.on_error(second, 3)
    flight.on_error(second, 3)
    assert not path.exists(), "a group dumps once"
    (note,) = second.__notes__
    assert first.__notes__ == [note] and str(path) in note
    del ring


def test_a_group_made_again_under_its_name_dumps_again(folder):
    for _ in range(2):
        ring = ring_of()
        flight.on_error(PeerLost("x", group="g"))
        (folder / "rank3.json").unlink()
        flight.retire(ring)


def test_a_users_mistake_and_tracing_turned_off_dump_nothing(folder, monkeypatch):
    ring = ring_of()
    flight.on_error(UsageError("x", group="g"))
    monkeypatch.setenv("DURE_TRACE_DIR", "OFF")
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    flight.on_error(PeerLost("x", group="g"))
    assert list(folder.iterdir()) == []
    del ring


def test_a_dump_that_fails_never_hides_the_error_and_is_noted_there(tmp_path, monkeypatch):
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("DURE_TRACE_DIR", str(blocker))
    ring = ring_of()
    error = PeerLost("x", group="g")
    flight.on_error(error)
    (note,) = error.__notes__
    assert str(blocker) in note
    crash = KeyError("of the program")
    flight.on_crash(crash)
    assert str(blocker) in crash.__notes__[0]
    with pytest.raises(OSError):
        dump()
    del ring

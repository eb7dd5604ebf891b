"""`dure plan --here`: when the machine is measured."""

import pytest

from dure.cli import here as here_module
from dure.cli.here import here
from dure.errors import UsageError
from tests.plan.test_measured import measured


def test_too_many_ranks_are_refused_before_anything_starts():
    with pytest.raises(UsageError, match="not have that many cores"):
        here(10_000)


@pytest.mark.parametrize("kept", ["", "[]", "[" * 100_000, '{"gpu": {"x": 1}}', "\udcff", None])
def test_machine_is_measured_again_if_what_was_kept_is_damaged(kept, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    calls: list[int] = []
    monkeypatch.setattr(here_module, "_measured", lambda n: calls.append(n) or measured(n))
    first = here(1)
    (file,) = tmp_path.glob("dure/*.json")
    assert here(1) == first and calls == [1]
    newer = file.read_text().replace('"version":1', '"version":2')
    file.write_bytes((newer if kept is None else kept).encode(errors="surrogateescape"))
    assert here(1) == first and calls == [1, 1]

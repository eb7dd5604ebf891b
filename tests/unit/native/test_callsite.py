"""Where a call was made, as text."""

from __future__ import annotations

import pytest

from dure.native import available, call_site

pytestmark = pytest.mark.skipif(not available()[0], reason=available()[1] or "-")


def _called_in(path: str) -> str:
    scope = {"call_site": call_site}
    exec(compile("site = call_site()", path, "exec"), scope)
    return str(scope["site"])


@pytest.mark.parametrize("letters", range(20, 80))
def test_long_path_is_cut_between_characters(letters):
    name = "가" * letters + ".py"
    told = _called_in("/" + name)
    path, _, place = told.partition(":1")
    assert ("/" + name).endswith(path.removeprefix("..."))
    assert place in ("", " in <module>")
    assert len(told.encode()) < 160

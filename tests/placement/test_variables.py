"""Every variable that detection reads is described."""

from __future__ import annotations

from dure.placement import CLUSTER_VARIABLES, detect
from tests.placement import environments as seen


class Watched(dict):
    """An environment that knows what it was asked for."""

    asked: set[str] = set()

    def get(self, name, default=None):
        self.asked.add(name)
        return super().get(name, default)


def test_every_variable_that_is_read_is_described():
    for environ in seen.ALL:
        detect(Watched(environ))
    assert set(CLUSTER_VARIABLES) >= Watched.asked
    assert len(Watched.asked) > 40

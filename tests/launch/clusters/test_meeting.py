"""Where the hosts of a job meet."""

import pytest

from dure.launch.clusters import meeting
from dure.launch.clusters.meeting import outward
from dure.store.address import Address, resolve


@pytest.fixture
def names(monkeypatch):
    """Know node1 as Debian's /etc/hosts does, and the way to node2."""
    known = {"node1": "127.0.1.1"}

    def look_up(host: str, port: int, purpose: str = "") -> Address:
        return resolve(known.get(host, host), port)

    ways = {"node2": "10.0.0.1", "six": "fd00::1"}
    monkeypatch.setattr(meeting, "resolve", look_up)
    monkeypatch.setattr(meeting, "interface_to", ways.get)


@pytest.mark.parametrize(
    ("endpoint", "hosts", "found"),
    [
        ("node1:20000", ["node1", "node2"], "10.0.0.1:20000"),
        ("node1:20000", ["node1", "six"], "[fd00::1]:20000"),
        ("node1:20000", ["node1"], "node1:20000"),
        ("node1:20000", ["node1", "unknown"], "node1:20000"),
        ("192.0.2.1:20000", ["192.0.2.1", "node2"], "192.0.2.1:20000"),
    ],
)
def test_endpoint_on_loopback_is_moved_to_where_others_see_it(names, endpoint, hosts, found):
    assert outward(endpoint, hosts) == found

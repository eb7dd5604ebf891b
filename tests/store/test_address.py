"""Where a store may listen: on one address, unless the user says that it may be all of them."""

import socket
from datetime import timedelta

import pytest

from dure.errors import StoreError, UsageError
from dure.store import HashStore, TCPStore, address
from dure.store.address import (
    Address,
    is_local,
    outward_address,
    own_address,
    resolve,
    resolve_shared,
)
from dure.store.identity import host_name
from dure.store.key import mint
from dure.store.listener import listen
from tests.waiting import PATIENCE_S

WILDCARDS = ["0.0.0.0", "*", "::", "0", "0x0", "0.0", "::0", "0:0:0:0:0:0:0:0", "::ffff:0.0.0.0"]
TIMEOUT = timedelta(seconds=PATIENCE_S)


@pytest.mark.parametrize("host", WILDCARDS)
def test_a_wildcard_is_refused_however_it_is_spelled(host: str) -> None:
    with pytest.raises(StoreError) as caught:
        resolve(host, 1, "the purpose")
    assert "DURE_STORE_BIND_ANY" in caught.value.fix
    assert "the purpose" in caught.value.what


def test_the_last_door_is_guarded_too() -> None:
    with pytest.raises(StoreError):
        listen(Address(family=socket.AF_INET, ip="0.0.0.0", port=0))


def test_a_wildcard_is_taken_where_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DURE_STORE_BIND", "0.0.0.0")
    monkeypatch.setenv("DURE_STORE_BIND_ANY", "1")
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=TIMEOUT, key=mint())
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.2", store.port)) == 0
    store.close()


def test_names_and_ports_are_checked() -> None:
    with pytest.raises(StoreError):
        resolve("no-such-host.invalid", 1)
    with pytest.raises(StoreError):
        resolve("127.0.0.1", 65536)
    assert is_local("127.0.0.1")
    assert is_local("localhost")
    assert not is_local("192.0.2.1")


def test_an_address_of_one_link_alone_is_taken_last_and_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(StoreError, match="must not be an address of one link alone"):
        resolve("fe80::1%lo", 1)
    found = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", (ip, 1)) for ip in ("fe80::1", "fd77::1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert resolve("host.local", 1).ip == "fd77::1"


@pytest.fixture
def debian(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give this host a name that means 127.0.1.1, as Debian does, and a network."""
    known = {"here": "127.0.1.1", "10.0.0.7": "10.0.0.7", "10.0.0.8": "10.0.0.8"}
    known |= {"there": "10.0.0.9", "localhost": "127.0.0.1", "127.0.0.1": "127.0.0.1"}

    def look_up(host: str, port: int, **_: object) -> list:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (known[host], port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(address, "interface_to", lambda host: "10.0.0.7")


@pytest.mark.parametrize(
    ("host", "ip"),
    [
        ("here", "10.0.0.7"),
        ("there", "10.0.0.9"),
        ("localhost", "127.0.0.1"),
        ("127.0.0.1", "127.0.0.1"),
    ],
)
@pytest.mark.usefixtures("debian")
def test_a_hosts_own_name_is_what_other_hosts_reach(host: str, ip: str) -> None:
    assert resolve_shared(host, 29500).endpoint == f"tcp://{ip}:29500"


@pytest.mark.usefixtures("debian")
def test_a_host_without_a_network_store_offers_what_other_hosts_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    assert outward_address(HashStore()) == "10.0.0.7"


@pytest.mark.usefixtures("debian")
def test_a_host_whose_own_name_is_unknown_offers_the_address_of_an_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def look_up(host: str, port: int, **_: object) -> list:
        if host == "unknown":
            raise socket.gaierror(-3, "Temporary failure in name resolution")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket, "gethostname", lambda: "unknown")
    assert own_address() == "10.0.0.7"
    monkeypatch.setattr(address, "interface_to", lambda host: None)
    monkeypatch.setattr(address, "first_address", lambda: None)
    with pytest.raises(StoreError, match="this host's own name cannot be resolved"):
        own_address()


def test_an_interface_that_this_host_does_not_have_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib7")
    with pytest.raises(UsageError, match="GLOO_SOCKET_IFNAME names an interface") as caught:
        outward_address(HashStore())
    assert caught.value.seen.startswith(f"'ib7' on {host_name()}, which has ")


@pytest.mark.usefixtures("debian")
def test_the_users_address_goes_first_and_without_a_network_it_is_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DURE_STORE_BIND", "10.0.0.8")
    assert resolve_shared("here", 1).ip == "10.0.0.8"
    monkeypatch.delenv("DURE_STORE_BIND")
    monkeypatch.setattr(address, "interface_to", lambda host: None)
    monkeypatch.setattr(address, "first_address", lambda: None)
    assert resolve_shared("here", 1).ip == "127.0.1.1"

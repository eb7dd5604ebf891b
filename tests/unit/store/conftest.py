"""Every kind of store, opened twice: what one handle does, the other must see."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from dure.store import EtcdStore, FileStore, HashStore, PrefixStore, Store, TCPStore
from dure.store.key import mint
from procs import etcd
from waiting import PATIENCE_S

TIMEOUT = timedelta(seconds=PATIENCE_S)
needs_etcd = pytest.mark.skipif(etcd.PROGRAM is None, reason="etcd is not installed")
KINDS = [
    "hash",
    "file",
    "tcp",
    pytest.param("etcd", marks=needs_etcd),
    "prefix-hash",
]

servers: list[etcd.Etcd] = []


@pytest.fixture(scope="session", autouse=True)
def one_etcd_for_all() -> Iterator[None]:
    """Start it before the first module, so that none has left it behind."""
    if etcd.PROGRAM is None:
        yield
        return
    with etcd.etcd() as server:
        servers.append(server)
        yield


def etcd_url() -> str:
    """Return the address of a job that nobody has had."""
    return f"etcd://{servers[0].names}/{uuid.uuid4().hex}"


@contextmanager
def opened(kind: str, folder: Path) -> Iterator[tuple[Store, Store]]:
    """Open two handles on one new store."""
    prefix, _, base = kind.rpartition("-")
    if base == "hash":
        first = second = HashStore(TIMEOUT)
    elif base == "file":
        first = FileStore(folder / "store", 2, TIMEOUT)
        second = FileStore(folder / "store", 2, TIMEOUT)
    elif base == "etcd":
        url = etcd_url()
        first, second = EtcdStore.from_url(url, TIMEOUT), EtcdStore.from_url(url, TIMEOUT)
    else:
        key = mint()
        first = TCPStore("127.0.0.1", 0, is_master=True, timeout=TIMEOUT, key=key)
        second = TCPStore("127.0.0.1", first.port, timeout=TIMEOUT, key=key)
    try:
        yield (PrefixStore("p", first), PrefixStore("p", second)) if prefix else (first, second)
    finally:
        second.close()
        first.close()


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Store, Store]]:
    with opened(request.param, tmp_path) as stores:
        yield stores


@pytest.fixture(autouse=True)
def own_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The user's key is the test's own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("DURE_JOB_KEY_FD", "DURE_JOB_KEY_FILE", "DURE_INSECURE", "DURE_STORE_BIND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("dure.store.rendezvous._LATE_S", 0.2)  # each failed meeting costs as much

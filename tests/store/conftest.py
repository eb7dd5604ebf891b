"""Every kind of store, opened twice: what one handle does, the other must see."""

import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from dure.store import (
    EtcdStore,
    FileStore,
    HashStore,
    JobKey,
    PrefixStore,
    Store,
    TCPStore,
)
from dure.store.address import resolve
from dure.store.identity import Identity, myself
from dure.store.key import mint
from dure.store.listener import listen
from dure.store.server import StoreServer
from tests.store.procs import etcd
from tests.waiting import PATIENCE_S

TIMEOUT = timedelta(seconds=PATIENCE_S)
KINDS = [
    *("hash", "file", "tcp", "prefix-hash"),
    pytest.param("etcd", marks=pytest.mark.needs("etcd")),
]

JOB_VARIABLES = (
    "RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_USE_AGENT_STORE "
    "TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT DURE_STORE_ADDR DURE_STORE_BIND "
    "DURE_JOB_KEY_FD DURE_JOB_KEY_FILE DURE_INSECURE"
)
servers: list[etcd.Etcd] = []


@pytest.fixture(scope="session", autouse=True)
def one_etcd_for_all() -> Iterator[None]:
    """Start a member before the first module, where etcd is installed."""
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


@pytest.fixture(params=["tcp", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path, port: int) -> str:
    return f"tcp://127.0.0.1:{port}" if request.param == "tcp" else f"file://{tmp_path}/meeting"


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This process is no rank of a job; the user's key is the test's own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in JOB_VARIABLES.split():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("dure.store.rendezvous._LATE_S", 0.2)  # each failed meeting costs as much


@pytest.fixture
def key() -> JobKey:
    return mint()


@pytest.fixture
def master(key: JobKey) -> Iterator[TCPStore]:
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=TIMEOUT, key=key)
    yield store
    store.close()


@pytest.fixture
def server(key: JobKey) -> Iterator[StoreServer]:
    it = StoreServer(listen(resolve("127.0.0.1", 0)), key)
    yield it
    it.stop()


def client(master: TCPStore, key: JobKey | None) -> TCPStore:
    return TCPStore(master.host, master.port, timeout=TIMEOUT, key=key)


def dead_process() -> Identity:
    """Return who a process was that has ended; its number may be another's by now."""
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    return msgspec.structs.replace(myself(), pid=child.pid, start="1")

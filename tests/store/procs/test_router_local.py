"""Unix sockets of the abstract namespace, which every user of a machine can see."""

import contextlib
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest

from dure.store.key import mint
from dure.store.listener import Listener
from dure.store.server import StoreServer
from tests.waiting import PATIENCE_S, until


@pytest.fixture
def server() -> Iterator[StoreServer]:
    it = StoreServer(Listener(endpoint=f"ipc://@dure-test-{uuid.uuid4().hex}"), mint())
    yield it
    it.stop()


@pytest.fixture
def name(server: StoreServer) -> str:
    return server.endpoint.removeprefix("ipc://@")


STRANGER = """
import os, socket, sys
user, name = int(sys.argv[1]), sys.argv[2]
os.setresuid(user, user, user)
with socket.socket(socket.AF_UNIX) as stranger:
    stranger.connect("\\0" + name)
    print(len(stranger.recv(10)))
"""


def heard_as(user: int, name: str) -> int:
    """Connect as a user; return how many bytes the server says."""
    words = [sys.executable, "-c", STRANGER, str(user), name]
    done = subprocess.run(words, capture_output=True, check=True, timeout=PATIENCE_S)
    return int(done.stdout)


def test_the_same_user_is_greeted(name: str) -> None:
    assert heard_as(os.getuid(), name) == 10


@pytest.mark.needs("root")
def test_another_user_does_not_hear_a_word(name: str) -> None:
    assert heard_as(65534, name) == 0


def test_a_stranger_of_this_host_is_told_of(
    server: StoreServer, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect("\0" + name)
        assert stranger.recv(10)
        until(lambda: server._guarded._joining)  # who leaves before he was looked at has no name
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(OSError):
            while stranger.recv(100):
                pass
    until(lambda: caplog.records)
    assert "a process of this host" in caplog.records[0].getMessage()

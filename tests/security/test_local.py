"""Unix sockets of the abstract namespace, which every user of a machine can see."""

import os
import socket
import uuid
from collections.abc import Iterator

import pytest

from dure.store.key import mint
from dure.store.server import StoreServer, listen_local


@pytest.fixture
def name() -> Iterator[str]:
    it = f"dure-test-{uuid.uuid4().hex}"
    server = StoreServer(listen_local(f"ipc://@{it}"), mint())
    yield it
    server.stop()


def heard_as(user: int, name: str) -> int:
    """Connect as another user, in a forked child; returns how many bytes the server says."""
    child = os.fork()
    if not child:
        heard = 99
        try:
            os.setresuid(user, user, user)
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.settimeout(5)
                stranger.connect("\0" + name)
                heard = len(stranger.recv(10))
        finally:
            os._exit(heard)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_the_same_user_is_greeted(name: str) -> None:
    assert heard_as(os.getuid(), name) == 10


def test_another_user_does_not_hear_a_word(name: str) -> None:
    if os.getuid():
        pytest.skip("only root can become another user")
    assert heard_as(65534, name) == 0

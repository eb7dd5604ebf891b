"""The port that is kept for rank 0."""

import socket

import pytest

from dure.launch.ranks.ports import reserve_port


def test_reserved_port_can_be_taken_by_a_server_with_reuse_only() -> None:
    keeper, port = reserve_port()
    with keeper:
        with socket.socket() as stranger, pytest.raises(OSError):
            stranger.bind(("127.0.0.1", port))
        for address in ("127.0.0.1", ""):
            socket.create_server((address, port)).close()

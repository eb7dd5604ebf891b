"""What an attacker has: plain sockets, forged ZMTP bytes, a proxy that records, a peer with a key.

Every attack comes from an address of its own (all of 127.0.0.0/8 is this machine), so that the
server's log can be asked who it was.
"""

import contextlib
import itertools
import random
import socket
from collections.abc import Iterator

import zmq

from dure.store.key import CurvePair, JobKey
from dure.store.wire import FRAME_LIMIT
from tests.waiting import PATIENCE_S

_numbers = itertools.count(2)

SIGNATURE = b"\xff" + bytes(8) + b"\x7f"


def greeting(mechanism: bytes = b"CURVE") -> bytes:
    """The 64 bytes that a ZMTP 3.1 client begins with."""
    return SIGNATURE + b"\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)


def frame_header(size: int, command: bool) -> bytes:
    """The header of a long frame that announces `size` bytes."""
    return (b"\x06" if command else b"\x02") + size.to_bytes(8, "big")


JUNK = [
    b"GET / HTTP/1.1\r\nHost: dure\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),  # TLS
    b"SSH-2.0-OpenSSH_9.2\r\n",
    b"\x80\x04\x95cposix\nsystem\n(S'id'\ntR.",  # a pickle
    random.Random(1).randbytes(100_000),
    SIGNATURE + b"\x01\x00",  # ZMTP 2
    greeting(b"NULL"),
    greeting(b"GSSAPI"),
    greeting() + frame_header(1 << 62, command=True),
    greeting() + b"\x04\x05hello",
    greeting() + b"\x04\xc8\x05HELLO" + bytes(194),
]
"""What strangers say that are no members."""


def new_source() -> str:
    """An address of this machine that no attack has come from before."""
    number = next(_numbers)
    return f"127.66.{number // 250}.{1 + number % 250}"


def connect(port: int, source: str = "") -> socket.socket:
    """Connect from an address of this machine; "": from one that no attack has come from before."""
    here = (source or new_source(), 0)
    return socket.create_connection(("127.0.0.1", port), PATIENCE_S, source_address=here)


def is_closed(stranger: socket.socket, timeout_s: float = PATIENCE_S) -> bool:
    """Whether the server closes the connection; what it says before is thrown away."""
    stranger.settimeout(timeout_s)
    try:
        while stranger.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


@contextlib.contextmanager
def peer(
    port: int,
    source: str,
    server: bytes | None = None,
    own: CurvePair | None = None,
    plain: bool = False,
) -> Iterator[zmq.Socket[bytes]]:
    """A ZeroMQ client with the given keys, or none: mechanism CURVE, PLAIN or NULL."""
    with zmq.Context() as context:
        client = context.socket(zmq.DEALER)
        client.linger = 0
        client.reconnect_ivl = -1
        client.sndhwm = client.rcvhwm = 1
        client.sndtimeo = client.rcvtimeo = 1000 * PATIENCE_S
        client.maxmsgsize = FRAME_LIMIT
        if own is not None and server is not None:
            client.curve_secretkey, client.curve_publickey = own.secret, own.public
            client.curve_serverkey = server
        if plain:
            client.plain_username, client.plain_password = b"admin", b"admin"
        client.connect(f"tcp://{source}:0;127.0.0.1:{port}")
        try:
            yield client
        finally:
            client.close(0)


def member(
    port: int, source: str, key: JobKey, of: str = "store"
) -> contextlib.AbstractContextManager[zmq.Socket[bytes]]:
    """A client that holds the job key, and says what it likes, to a store or a worker of "rpc"."""
    return peer(port, source, key.pair(f"{of} server").public, key.pair(f"{of} client"))

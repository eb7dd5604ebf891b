"""Strangers and rogue members at the port of a worker of RPC, and garbage in its memory.

The attacks are those on the store's port (`test_hostility`); the listener is the same code. Each is
made while genuine calls to that worker go on.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import zmq

from dure import native, rpc
from dure.errors import RpcError
from dure.rpc.current import current
from dure.rpc.message import MessageType, RpcMessage
from dure.rpc.transport import HostTransport
from dure.store.key import CurvePair, JobKey, mint
from dure.store.router import read_event
from tests.rpc import served
from tests.rpc.procs.rpc_workers import Start, double, workers
from tests.store.procs.wire_tools import member, new_source
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.needs("engine")


_REFUSED = (zmq.Event.DISCONNECTED, zmq.Event.CLOSED)


@dataclass
class Attacked:
    """A worker, with a program that calls it."""

    id: int
    port: int
    key: JobKey

    @contextlib.contextmanager
    def under_attack(self) -> Iterator[None]:
        """Attack inside: calls are answered meanwhile and after."""
        over, errors, calls = threading.Event(), list[BaseException](), [0]

        def work() -> None:
            try:
                while not over.wait(0.002):
                    assert rpc.rpc_sync("v", double, (21,)) == 42
                    calls[0] += 1
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
            so_far = calls[0]
            until(lambda: errors or calls[0] > so_far, "a call after the attack")
        finally:
            over.set()
            thread.join()
        assert not errors, errors


def transport() -> HostTransport:
    found = current().transport
    assert isinstance(found, HostTransport)
    return found


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    url = f"file://{tmp_path_factory.mktemp('rpc')}/meeting"
    Start(name="program", rank=0, url=url).init()
    try:
        start = Start(name="v", url=url, allow=[double, "tests.rpc.served"])
        start.variables["TP_SOCKET_IFNAME"] = "lo"  # where the attackers are
        with workers(start) as (worker,):
            id = worker.joined()
            found = until(lambda: transport().peers.find(id), "the worker")
            until(lambda: "v" in {each.name for each in current().workers}, "the worker to be told")
            assert rpc.rpc_sync(id, double, (1,)) == 2
            key = transport()._sockets._key
            assert key is not None
            yield Attacked(id, int(found.endpoint.rpartition(":")[2]), key)
            worker.leave(graceful=False)
            worker.left()
    finally:
        rpc.shutdown(graceful=False)


def test_a_message_that_cannot_be_read_is_dropped(
    attacked: Attacked, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = msgspec.msgpack.encode(RpcMessage(MessageType.CALL, 99))
    with attacked.under_attack():
        for junk in (b"junk", b"\x9a", stranger):
            transport()._inbox.post(junk)
        until(lambda: caplog.text.count("a message is ignored") == 3, "the messages to be read")
    transport()._hand_over(stranger, (), 7)
    of_v = msgspec.msgpack.encode(RpcMessage(MessageType.CALL, attacked.id))
    transport()._hand_over(of_v, (), 7)  # from another than it says
    assert caplog.text.count("malformed message from worker 7") == 2


@pytest.mark.parametrize("key", ["another", "of the store", "none"])
def test_other_keys_are_refused(key: str, attacked: Attacked) -> None:
    own = {
        "another": mint().pair("rpc client"),
        "of the store": attacked.key.pair("store client"),
        "none": None,
    }[key]
    with attacked.under_attack():
        assert is_refused(attacked, own)
    assert not is_refused(attacked, attacked.key.pair("rpc client"))


def is_refused(attacked: Attacked, own: CurvePair | None) -> bool:
    """Tell whether the handshake of somebody who has these keys fails."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger, stranger.reconnect_ivl = 0, -1
        if own is not None:
            stranger.curve_secretkey, stranger.curve_publickey = own.secret, own.public
            stranger.curve_serverkey = attacked.key.pair("rpc server").public
        stranger.monitor("inproc://stranger", zmq.EVENT_ALL)
        with context.socket(zmq.PAIR) as monitor:
            monitor.linger = 0
            monitor.connect("inproc://stranger")
            stranger.connect(f"tcp://{new_source()}:0;127.0.0.1:{attacked.port}")
            event = zmq.Event(0)
            while event not in (*_REFUSED, zmq.Event.HANDSHAKE_SUCCEEDED):
                assert monitor.poll(PATIENCE_S * 1000)
                event, _ = read_event(monitor)
            return event in _REFUSED


def opening(packed: bytes, length: int | None = None) -> bytes:
    """Return the first frame of a message, whose opening is as long as that, or says so."""
    return (len(packed) if length is None else length).to_bytes(8, "little") + packed


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\0\xc1"],
        [b"\0" + msgspec.msgpack.encode(["another world", 0]), opening(b"x")],
        [b"\0%s", opening(b"\xdd\xff\xff\xff\xff")],  # an array of 4 billion
        [b"\0%s", opening(msgspec.msgpack.encode([b"no message", []]))],
        [b"\0%s", opening(msgspec.msgpack.encode([b"", [-1]]))],
        [b"\0%s", opening(b"x", 8), bytes(9)],  # longer than announced
        [b"\0%s", opening(msgspec.msgpack.encode([b"x", [1 << 60]]))],  # memory of an exabyte
        [b"\0%s", opening(b"x", 1 << 60)],
        [b"\3"],
    ],
    ids=lambda frames: repr(frames[-1][:14]),
)
def test_malformed_frames_of_a_member_are_ignored(frames: list[bytes], attacked: Attacked) -> None:
    hello = msgspec.msgpack.encode([transport()._sockets._world, 7])
    with (
        attacked.under_attack(),
        member(attacked.port, new_source(), attacked.key, "rpc") as rogue,
    ):
        for frame in frames:
            rogue.send(frame.replace(b"%s", hello))


@pytest.mark.parametrize("garbage", [b"", b"\xc0", b"\xc1" * 100, bytes(5000), b"\x91" * 8000])
def test_garbage_in_a_ring_is_passed_over(garbage: bytes, attacked: Attacked) -> None:
    worker = transport().peers.named("v")
    assert worker is not None
    process = native.heap_peer(*worker.heap)
    assert process is not None
    with attacked.under_attack():
        ring = native.Outbox.claim(process, worker.inbox)
        assert ring is not None
        assert ring.send(garbage)


def test_what_is_not_on_the_list_does_not_run(attacked: Attacked, tmp_path: Path) -> None:
    logging.getLogger("dure.rpc").setLevel(logging.CRITICAL)
    try:
        assert rpc.rpc_sync("v", served.double, (2,)) == 4
        for function, args in [
            (Path.touch, (tmp_path / "run",)),
            (eval, ("1",)),
            (served.imported, ()),
            (getattr, (served.Counter(1), "number")),
        ]:
            with pytest.raises(RpcError, match=r"init_rpc\(allow="):
                rpc.rpc_sync("v", function, args)
        assert not (tmp_path / "run").exists()
    finally:
        logging.getLogger("dure.rpc").setLevel(logging.NOTSET)

"""Channels between leaders: what is left of one that cannot be opened."""

from __future__ import annotations

import os
import struct
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import zmq

from dure.comm.backends.base import BackendOptions
from dure.comm.backends.hybrid import control
from dure.comm.backends.hybrid.control import open_channel
from dure.comm.backends.hybrid.subcomms import group_by_host
from dure.errors import StoreTimeout
from dure.store import HashStore


def test_channel_that_cannot_be_opened_leaves_nothing_to_wait_for():
    context = zmq.Context()
    options = BackendOptions(
        store=HashStore(),
        rank=1,
        size=2,
        global_ranks=(0, 1),
        timeout=timedelta(milliseconds=1),
        name="alone",
    )
    with pytest.raises(StoreTimeout) as caught:  # its traceback holds all that the call had
        open_channel(context, 1, 0, "127.0.0.1", options)
    end = threading.Thread(target=context.term, daemon=True)
    end.start()
    end.join(5)
    assert not end.is_alive(), caught


class _Busy:
    """A channel whose leader's thread is in the middle of using it."""

    def __init__(self, context: zmq.Context) -> None:
        self.socket, self.monitor = context.socket(zmq.DEALER), context.socket(zmq.PAIR)
        self.lost, self.left, self.heard = 0.0, -1, 0.0
        self.begun, self.go, self.closed = threading.Event(), threading.Event(), threading.Event()

    def say(self, message) -> None:
        self.lost = None

    def close(self) -> None:
        self.socket.close(0)
        self.monitor.close(0)
        self.closed.set()


def _watch(state: SimpleNamespace) -> control.Watch:
    """Return the watch of a leader whose host is the only one."""
    comms = SimpleNamespace(state=state, hosts=group_by_host([("a", "a")], 0), absent=tuple)
    headers = SimpleNamespace(begun=0, opened=0)
    options = SimpleNamespace(store=HashStore(), timeout=timedelta(seconds=1))
    return control.Watch(comms, headers, options)  # pyright: ignore


def test_what_the_watch_uses_is_closed_by_the_thread_that_uses_it(monkeypatch):
    monkeypatch.setattr(control, "_GOODBYE_S", 0.01)
    in_use, go = threading.Event(), threading.Event()
    state = SimpleNamespace(listeners=[], look=lambda: (in_use.set(), go.wait(10))[0])
    watch = _watch(state)
    channel = _Busy(watch._context)
    watch._channels.append(channel)  # pyright: ignore
    watch.start()
    assert in_use.wait(10)
    watch.stop(0)
    assert not channel.closed.is_set()
    watch._nudge()
    go.set()
    assert channel.closed.wait(10)
    assert watch._thread is not None
    watch._thread.join(10)
    read, write = os.pipe()  # the descriptors that the watch had are free again
    watch._nudge()
    os.set_blocking(read, False)
    with pytest.raises(BlockingIOError):
        os.read(read, 1)
    os.close(read)
    os.close(write)


def test_a_channel_that_breaks_after_its_leader_has_left_does_not_keep_the_watch_busy():
    state = SimpleNamespace(listeners=[], look=lambda: None)
    watch = _watch(state)
    socket, monitor, teller = (
        watch._context.socket(kind) for kind in (zmq.DEALER, zmq.PAIR, zmq.PAIR)
    )
    teller.bind("inproc://teller")
    monitor.connect("inproc://teller")
    watch._channels.append(control.Channel(1, socket, monitor, left=0, lost=1.0))
    watch.start()
    teller.sndhwm = 1
    for _ in range(5000):  # more than are kept for a reader that does not read
        assert teller.poll(10_000, zmq.POLLOUT), (
            "the watch does not read what would wake it for ever"
        )
        teller.send_multipart([struct.pack("=hi", zmq.Event.DISCONNECTED, 0), b""])
    teller.close(0)
    watch.stop(0)
    assert watch._thread is not None
    watch._thread.join(10)
    assert not watch._thread.is_alive()

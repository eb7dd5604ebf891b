"""How long a host may be silent: one setting, which the kernel's probes keep exactly."""

from __future__ import annotations

import os
import socket

import pytest
import zmq

from dure.errors import UsageError
from dure.store.silence import ListeningClock, end_after_silence, silence_s


@pytest.mark.parametrize("text", ["1", "0", "-30"])
def test_a_silence_that_any_busy_machine_exceeds_is_refused(monkeypatch, text):
    monkeypatch.setenv("DURE_SILENCE", text)
    with pytest.raises(UsageError, match="DURE_SILENCE"):
        silence_s()


@pytest.mark.parametrize(
    ("silence", "first", "probes"),
    [("2", 1, 1), ("3", 1, 2), ("30", 5, 5)],
)
def test_probes_of_the_kernel_take_as_long_as_the_silence(monkeypatch, silence, first, probes):
    """The first probe comes after as long as lies between two, so all take (1 + probes) * first."""
    monkeypatch.setenv("DURE_SILENCE", silence)
    with zmq.Context() as context, context.socket(zmq.DEALER) as opened:
        end_after_silence(opened)
        assert (opened.tcp_keepalive_idle, opened.tcp_keepalive_intvl) == (first, first)
        assert opened.tcp_keepalive_cnt == probes
    assert first * (1 + probes) == int(silence)


def test_zeromq_hands_the_setting_to_the_kernel(monkeypatch):
    monkeypatch.setenv("DURE_SILENCE", "12")
    with zmq.Context() as context, context.socket(zmq.DEALER) as opened:
        end_after_silence(opened)
        with opened.get_monitor_socket() as monitor, socket.create_server(("127.0.0.1", 0)) as to:
            opened.connect(f"tcp://127.0.0.1:{to.getsockname()[1]}")
            with to.accept()[0]:
                number = -1
                while number < 0:
                    frame = monitor.recv_multipart()[0]
                    event, value = int.from_bytes(frame[:2], "little"), frame[2:6]
                    if event == zmq.Event.CONNECTED:
                        number = int.from_bytes(value, "little")
                with socket.socket(fileno=os.dup(number)) as connection:
                    got = [
                        connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                        connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
                        connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL),
                        connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT),
                        connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
                    ]
            opened.disable_monitor()
    assert got == [1, 2, 2, 5, 12_000]


def test_a_listening_clock_stands_still_while_its_thread_is_paused():
    real = [100.0]
    clock = ListeningClock(lambda: real[0])
    clock.turn(2.0)
    real[0] += 2.0  # as was said
    clock.turn(1.0)
    assert clock.now() == 102.0
    real[0] += 11.0  # ten seconds more than was said
    assert clock.now() == 103.0  # also before it says that it runs again
    clock.turn()
    assert clock.now() == 103.0
    real[0] += 50.0  # nothing was said
    clock.turn(1.0)
    assert clock.now() == 153.0

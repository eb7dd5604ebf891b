"""How long a host may be silent: one setting, which the kernel's probes keep exactly."""

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
        assert (opened.tcp_keepalive, opened.tcp_keepalive_cnt) == (1, probes)
        assert opened.tcp_maxrt == 1000 * int(silence)
    assert first * (1 + probes) == int(silence)


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

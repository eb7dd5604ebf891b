"""Signals to the launcher."""

from __future__ import annotations

import os
import signal

import pytest

from dure.launch.signals import caught_signals, read_signals


@pytest.mark.parametrize("ignored", [False, True])
def test_signals_arrive_unless_they_were_ignored_before(ignored: bool) -> None:
    """As by `nohup`, or in a background job of a script."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with caught_signals((signal.SIGHUP, signal.SIGTERM)) as fd:
            for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR2):
                os.kill(os.getpid(), number)
            arrived = set(read_signals(fd))
        assert arrived == {signal.SIGTERM, signal.SIGUSR2} | (set() if ignored else {signal.SIGHUP})
        assert signal.getsignal(signal.SIGHUP) is (signal.SIG_IGN if ignored else signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)

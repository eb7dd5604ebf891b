"""Signals to the launcher."""

import os
import signal

import pytest

from dure.launch.signals import caught_signals, first_of, read_signals


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


def test_while_no_rank_runs_only_signals_that_end_the_job_count_and_ctrl_z_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = (signal.SIGINT, signal.SIGTERM)
    stopped: list[int] = []
    with caught_signals(asked) as fd:
        for number in (signal.SIGUSR1, signal.SIGTSTP, signal.SIGTERM):
            os.kill(os.getpid(), number)
        monkeypatch.setattr(os, "kill", lambda pid, number: stopped.append(number))
        assert first_of(asked, fd) == signal.SIGTERM
        assert stopped == [signal.SIGSTOP]
        assert first_of(asked, fd) is None

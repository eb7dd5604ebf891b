"""Being asked to end: noted, told once at the end of a step, and undone afterwards."""

import os
import signal
from collections.abc import Iterator

import pytest

import dure
from dure.elastic import State, preempt


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    preempt.forget()
    assert signal.getsignal(signal.SIGTERM) == before


def test_callbacks_run_once_at_the_end_of_a_step():
    called: list[int] = []
    assert dure.elastic.on_preempt(lambda: called.append(1)) is not None
    assert not dure.elastic.preempted()
    os.kill(os.getpid(), signal.SIGTERM)
    assert called == []
    assert dure.elastic.preempted() and dure.elastic.preempted()
    assert called == [1]


def test_a_handler_that_was_there_is_called_too():
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        preempt.watch()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM] * 2 and preempt.asked()
        preempt.forget()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_run_ends_with_a_code_of_its_own_and_puts_the_handler_back():
    def train(state: State) -> None:
        for _ in range(3):
            state.commit()
            os.kill(os.getpid(), signal.SIGTERM)

    state = State()
    with pytest.raises(SystemExit) as ended:
        dure.elastic.run(train, state)
    assert ended.value.code == 143 and state.commits == 2
    assert ended.value.__suppress_context__  # the launcher shows how a rank ended
    assert not preempt.asked()


def test_slurm_may_announce_the_end_with_another_signal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    preempt.watch()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert preempt.asked()


def test_signals_of_one_request_are_noted_once_and_a_later_one_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
):
    preempt.watch()
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number))
    for _ in range(2):
        preempt._note(signal.SIGTERM, None)
    assert preempt.asked() and sent == []
    preempt._notes.one_request_until = 0.0
    preempt._note(signal.SIGTERM, None)
    assert sent == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

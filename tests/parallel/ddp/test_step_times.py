"""What a step's stamps say: how long it took, and how much of the communication was exposed."""

from __future__ import annotations

from dure.parallel.ddp import step_times
from dure.training import module_times


def test_exposed_communication_is_what_starts_take_and_what_follows_backward(monkeypatch):
    seconds = iter([1, 4, 7, 8, 14, 16, 17])

    def now() -> int:
        return next(seconds) * 10**9

    monkeypatch.setattr(step_times, "now", now)
    monkeypatch.setattr(module_times, "now", now)
    clock = step_times.BucketClock()
    clock.begin_forward()  # at 1
    clock.begin_backward()  # at 4
    clock.launched(6 * 10**9, 100)  # until 7
    clock.launched(7 * 10**9, 20)  # until 8
    clock.end_compute()  # at 14
    exposed = clock.exposed
    clock.launched(15 * 10**9, 3)  # until 16
    clock.reduced(exposed)  # at 17
    times = clock.times()
    assert (times.forward_s, times.backward_s, times.comm_s) == (3, 10, 11)
    assert times.exposed_comm_s == 2 + 3
    assert times.overlap_s == 11 - 5
    assert (times.step, times.num_bytes) == (1, 123)

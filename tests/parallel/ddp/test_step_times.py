"""What a step's stamps say: how long it took, and how much of the communication was exposed."""

from __future__ import annotations

from dure.parallel.ddp.step_times import Clock

S = 10**9


def test_exposed_communication_is_what_starts_take_and_what_follows_backward():
    clock = Clock()
    clock.forward, clock.backward_start, clock.backward_end = 1 * S, 4 * S, 14 * S
    clock.comm_start, clock.comm_end, clock.launch_ns = 6 * S, 17 * S, 2 * S
    times = clock.times()
    assert (times.forward_s, times.backward_s, times.comm_s) == (3, 10, 11)
    assert times.exposed_comm_s == 2 + 3
    assert times.overlap_s == 11 - 5

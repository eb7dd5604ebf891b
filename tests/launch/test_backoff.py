"""When the next round starts."""

from dure.launch.backoff import restart_delay


def test_restarts_wait_longer_while_rounds_fail_at_once() -> None:
    assert [restart_delay(n, 30.0) for n in range(9)] == [0, 0, 1, 2, 4, 8, 16, 30, 30]
    assert restart_delay(10_000, 30.0) == 30.0
    assert restart_delay(5, 0.0) == 0.0

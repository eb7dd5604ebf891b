"""What became of a job, and the error that says so."""

import pytest

from dure.errors import LaunchError
from dure.launch.spec import Crash, Exit, JobResult, RankResult


def test_a_failed_job_without_failed_ranks_has_no_first_failure() -> None:
    with pytest.raises(ValueError, match="no rank failed"):
        LaunchError("a host could not be reached").get_first_failure()


def test_a_failed_job_lists_the_ranks_that_failed_as_torch_does() -> None:
    crash = Crash(type="ValueError", message="my bug", traceback="Traceback ...", exit_code=3)
    killed = RankResult(rank=4, host="b", pid=14, exit=Exit(signal=9))
    ranks = (
        RankResult(rank=0, host="a", pid=10, exit=Exit(signal=15), ended_by_launcher=True),
        RankResult(rank=1, host="a", pid=11, exit=Exit(code=3), crash=crash),
        RankResult(rank=2, host="a", pid=12, exit=Exit(code=0)),
        RankResult(rank=3, host="b", pid=13, exit=Exit(code=7)),
        killed,
    )
    with pytest.raises(LaunchError) as caught:
        JobResult(exit_code=137, ranks=ranks, elapsed_s=1, first_failure=killed).check()
    failures = caught.value.failures
    assert list(failures) == [4, 1, 3]
    assert caught.value.get_first_failure() == (4, failures[4])
    assert [(f.local_rank, f.pid, f.exitcode) for f in failures.values()] == [
        (1, 14, -9),
        (1, 11, 3),
        (0, 13, 7),
    ]
    assert failures[4].message == "Signal 9 (SIGKILL) received by PID 14"
    assert failures[4].signal_name() == "SIGKILL"
    assert failures[1].message["message"] == "ValueError: my bug"
    assert failures[1].message["extraInfo"]["py_callstack"] == "Traceback ..."
    assert (failures[3].message, failures[3].signal_name()) == ("exit code 7", "<N/A>")

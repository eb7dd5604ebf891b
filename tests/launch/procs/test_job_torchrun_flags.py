"""Habits of torchrun's users: files and streams, error files, signals, binding, variables."""

import os
import signal

import pytest

from dure.errorfile import read_error
from tests.launch.procs.launching import Launching, wait_for_lines

SPEAK = """
    import os, sys, time
    print("out of", os.environ["RANK"])
    print("loss 1.5" if os.environ["RANK"] == "1" else "quiet")
    print("error of", os.environ["RANK"], file=sys.stderr)
    while os.environ["RANK"] == "1" and not os.path.exists("ended"):
        time.sleep(0.01)
    open("ended", "w").close()
    assert os.environ["RANK"] == "0", "rank 1 fails"
"""


def test_streams_go_to_files_and_terminal_as_torchruns_do(job: Launching) -> None:
    """Rank 0's output goes to its file alone, rank 1's errors to both."""
    logs = job.directory / "logs"
    flags = ("--log_dir", str(logs), "-r", "0:1", "-t", "1:2", "--duplicate-stdout-filters", "loss")
    done = job.run("-n2", *flags, "--rdzv-id=me", job.write(SPEAK))
    assert done.code == 1, done.err
    kept = {str(p.relative_to(logs)): p.read_text() for p in logs.rglob("attempt_0/**/*.log")}
    assert kept.pop("me/attempt_0/rank_1/stderr.log").startswith("error of 1\n")
    assert kept == {
        "me/attempt_0/rank_0/stdout.log": "out of 0\nquiet\n",
        "me/attempt_0/filtered_stdout.log": "[1] loss 1.5\n",
    }
    assert done.lines(0) == []
    assert done.lines(1) == ["out of 1", "loss 1.5"]
    assert "[0] error of 0" in done.err
    assert "[1] error of 1" in done.err
    error = read_error(logs / "me/attempt_0/rank_1/error.json")  # though it is not decorated
    assert error.message == "AssertionError: rank 1 fails"
    assert not (logs / "me/attempt_0/rank_0/error.json").exists()


def test_ranks_not_asked_for_are_not_shown_and_streams_go_to_a_new_directory_that_is_named(
    job: Launching,
) -> None:
    environment = {"PET_LOCAL_RANKS_FILTER": "1"}
    done = job.run("-n", "2", "--redirects", "0:3", job.write(SPEAK), env=environment)
    assert (done.lines(0), done.lines(1)) == ([], ["out of 1", "loss 1.5"])
    assert "error of 0" not in done.err
    (directory,) = job.directory.glob("logs_dure_*")
    assert str(directory) in done.err
    assert (directory / "attempt_0/rank_0/stderr.log").read_text() == "error of 0\n"


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("raise ValueError('deep down')", "ValueError: deep down"),
        ("import os; os.kill(os.getpid(), 9)", "rank 0 on "),
    ],
)
def test_failure_is_handed_on_to_a_launcher_around_this_one(
    job: Launching, program: str, message: str
) -> None:
    file = job.directory / "outer.json"
    done = job.run("-n", "1", job.write(program), env={"TORCHELASTIC_ERROR_FILE": str(file)})
    error = read_error(file)
    assert error.message.startswith(message)
    assert error.exit_code == done.code


@pytest.mark.parametrize(
    ("flags", "code"),
    [(("--signals-to-handle", "SIGUSR1"), 128 + signal.SIGUSR1), ((), 3)],
    ids=["ends the job", "warns the ranks"],
)
def test_signal_is_passed_on_to_ranks_that_catch_it(
    job: Launching, flags: tuple[str, ...], code: int
) -> None:
    program = job.write("""
        import signal, sys, time
        signal.signal(signal.SIGUSR1, lambda *_: (print("saved", flush=True), sys.exit(3)))
        print("up", flush=True)
        time.sleep(600)
    """)
    process = job.start("-n", "1", *flags, program)
    wait_for_lines(process, 1)
    process.send_signal(signal.SIGUSR1)
    done = job.finish(process)
    assert done.code == code, done.err
    assert done.lines(0) == ["saved"]


def test_ranks_are_bound_before_their_program_runs(job: Launching) -> None:
    """To the cores of one node each, which all are where there is but one."""
    cpus = os.sched_getaffinity(0)
    script = job.write("import os; print(os.environ['OMP_NUM_THREADS'], os.sched_getaffinity(0))")
    done = job.run("-n", "2", "--numa-binding", "node", script)
    assert done.code == 0, done.err
    for rank in (0, 1):
        bound = set(map(int, done.lines(rank)[0].partition(" ")[2].strip("{}").split(",")))
        assert bound and bound <= cpus
    refused = job.run("-n", "2", "--numa-binding", "exclusive", script)
    if not os.path.exists("/proc/driver/nvidia/gpus"):
        assert refused.code != 0  # torch says why

"""How a job ends: failures, signals, grandchildren; and what `JobResult` says of it."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dure.errors import LaunchError
from dure.launch import JobSpec, Line, run_job
from dure.launch import round as round_module
from tests.launch.procs.launching import DURE, Launching, wait_for_lines
from tests.waiting import PATIENCE_S, until

NEVER_S = "3600"  # a grace after which pytest would have ended the test
STUBBORN = """
    import signal, time
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    print("up")
    time.sleep(600)
"""
FAMILY = """
    import os, signal, subprocess, time
    subprocess.Popen(["sleep", "600"])
    subprocess.Popen(["setsid", "sleep", "600"])
    if os.fork() == 0:  # a daemon: leaves its parent and its session
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        os._exit(0)
    os.wait()
    print("up")
    time.sleep(600)
"""


def failing(job: Launching, how: str) -> str:
    """A program whose rank 1 fails while rank 0 is in a function that is called `waiting`."""
    return job.write(f"""
        import os, signal, sys, time
        def waiting():
            open("0.up", "w").close()
            time.sleep(600)
        if os.environ["RANK"] == "0":
            waiting()
        while not os.path.exists("0.up"):
            time.sleep(0.01)
        {how}
    """)


def run_quietly(program: str, nproc: int, lines: list[Line]):
    return run_job(
        JobSpec(program=program, nproc=nproc, on_line=lines.append, quiet=True, stdin="none")
    )


@pytest.mark.parametrize(
    ("how", "code", "crash"),
    [
        ("raise ValueError('wrong')", 1, "ValueError"),
        ("sys.exit(7)", 7, "SystemExit"),
        ("sys.exit('words')", 1, "SystemExit"),
        ("os._exit(9)", 9, None),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, None),
    ],
)
def test_failure_ends_the_others_and_says_where_they_were(
    job: Launching, monkeypatch: pytest.MonkeyPatch, how: str, code: int, crash: str | None
) -> None:
    monkeypatch.chdir(job.directory)
    result = run_quietly(failing(job, how), 2, [])
    failure, other = result.first_failure, result.ranks[0]
    assert failure is not None
    assert (result.exit_code, failure.rank) == (code, 1)
    assert (failure.crash.type if failure.crash else None) == crash
    assert (other.ended_by_launcher, other.exit.signal) == (True, signal.SIGTERM)
    assert "waiting" in [frame.function for frame in other.stack]
    with pytest.raises(LaunchError) as caught:
        result.check()
    assert caught.value.report is failure


def test_crash_carries_the_programs_own_traceback(job: Launching) -> None:
    program = job.write("def f():\n    raise KeyError('k')\nf()\n")
    lines: list[Line] = []
    failure = run_quietly(program, 1, lines).first_failure
    printed = [line.text.decode() for line in lines if line.stream == "stderr"]
    plain = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert printed == plain.stderr.splitlines() == failure.crash.traceback.splitlines()


def test_function_leaks_no_descriptor_and_success_has_no_failure(job: Launching) -> None:
    def descriptors_after_a_job() -> int:
        result = run_quietly(program, 2, [])
        result.check()
        assert (result.ok, result.first_failure) == (True, None)
        assert [rank.exit.code for rank in result.ranks] == [0, 0]
        for thread in threading.enumerate():
            if thread.name.startswith("dure"):
                thread.join(PATIENCE_S)  # the store lets its clients leave first
        return len(os.listdir("/proc/self/fd"))

    program = job.write("print(1)")
    first = descriptors_after_a_job()
    assert [descriptors_after_a_job() for _ in range(2)] == [first] * 2


def test_error_in_on_line_ends_the_job(job: Launching, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(line: Line) -> None:
        raise ZeroDivisionError

    monkeypatch.setenv(*job.tag.split("="))
    with pytest.raises(ZeroDivisionError):
        run_job(JobSpec(program=job.write(STUBBORN), nproc=2, on_line=fail, quiet=True))
    assert job.left() == []


@pytest.mark.parametrize(
    ("program", "number", "code"),
    [
        (FAMILY, signal.SIGINT, 130),
        (FAMILY, signal.SIGTERM, 143),
        (STUBBORN, signal.SIGHUP, 129),
    ],
)
def test_signal_ends_everything(job: Launching, number: int, code: int, program: str) -> None:
    process = job.start("-n", "2", job.write(program))
    wait_for_lines(process, 2)
    process.send_signal(number)
    done = job.finish(process)
    assert done.code == code
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("event", "what"),
    [("import", "dure.cli.app"), ("import", "dure.launch"), ("subprocess.Popen", "")],
    ids=["first", "loading", "starting"],
)
def test_ctrl_c_at_the_very_beginning_is_one_line(job: Launching, event: str, what: str) -> None:
    code = f"""if True:
        import os, signal, sys
        def interrupt(event, arguments):
            if not sent and event == {event!r} and {what!r} in ("", arguments[0]):
                sent.append(event)
                os.kill(os.getpid(), signal.SIGINT)
        sent = []
        sys.addaudithook(interrupt)
        from dure.cli import main
        main("run")
    """
    program = job.write(STUBBORN)
    done = job.finish(job.start_any(sys.executable, "-c", code, "-n", "2", program))
    assert done.code == 130
    assert "Traceback" not in done.err
    if event == "import":
        assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_lets_ranks_clean_up(job: Launching, number: int) -> None:
    program = job.write("""
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        try:
            print("up")
            time.sleep(600)
        finally:
            print("saved")
    """)
    process = job.start("-n", "2", "--timeout-term", NEVER_S, program)
    wait_for_lines(process, 2)
    process.send_signal(number)
    done = job.finish(process)
    assert done.lines(0) == done.lines(1) == ["saved"]
    assert done.code == 128 + number


DETACHED = """
    import os, subprocess, sys
    options = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    subprocess.Popen(["sleep", "600"], **options)
    if os.environ["RANK"] == "1":
        subprocess.Popen(["sleep", "601"], start_new_session=True, **options)
    sys.exit(int(sys.argv[1]))
"""


def test_what_ranks_have_detached_stays_if_all_succeeded_and_their_own_children_end(
    job: Launching,
) -> None:
    program = job.write(DETACHED)
    assert job.run("-n", "2", program, "3").code == 3  # and nothing is left
    process = job.start("-n", "2", program, "0")
    _, said = process.communicate(timeout=PATIENCE_S)
    left = job.kill()
    assert process.returncode == 0
    assert len(left) == 1
    assert f"left running, in sessions of their own: sleep (pid {left[0]})" in said


ESCAPED = """
    import os, subprocess, sys, time
    alone = ["env", "-i", "setsid", "/bin/sleep", "600"]
    escaped = subprocess.Popen(alone, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    in_session = subprocess.Popen(["sleep", "600"], env={}, stdout=subprocess.DEVNULL)
    print(escaped.pid, in_session.pid)
    if sys.argv[1] == "raise":
        while os.getsid(escaped.pid) != escaped.pid:
            time.sleep(0.01)
        raise ValueError
    time.sleep(600)
"""


@pytest.mark.parametrize("how", ["raise", "SIGTERM"])
def test_process_with_its_own_session_and_environment_ends_with_the_job(
    job: Launching, how: str
) -> None:
    process = job.start("-n", "1", "--timeout-term", "0.2", job.write(ESCAPED), how)
    pids = [int(word) for word in process.stdout.readline().partition("] ")[2].split()]
    if how == "SIGTERM":
        until(lambda: os.getsid(pids[0]) == pids[0])
        process.send_signal(signal.SIGTERM)
    assert job.finish(process).code == (1 if how == "raise" else 143)
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


@pytest.mark.parametrize("zygote", [("--preload", "decimal"), ("--no-zygote",)], ids=str)
def test_launcher_killed_takes_everything_along(job: Launching, zygote: tuple[str, ...]) -> None:
    process = job.start("-n", "2", *zygote, job.write(FAMILY))
    wait_for_lines(process, 2)
    process.kill()
    job.wait_until_gone()
    assert list(job.directory.iterdir()) == [job.directory / "prog.py"]


def test_output_that_nobody_or_no_disk_takes_ends_the_job(job: Launching) -> None:
    program = job.write("while True: print('x' * 1000)")
    process = job.start("-n", "2", program)
    wait_for_lines(process, 1)
    process.stdout.close()
    assert process.wait(PATIENCE_S) == 128 + signal.SIGPIPE
    with open("/dev/full", "wb") as full:
        done = job.finish(job.start_any(*DURE, "run", program, stdout=full))
    assert done.code == 1, done.err  # no SIGPIPE


GOES_ON = """
    import os, signal
    import torch
    import dure as dist
    dist.init_process_group()
    dist.barrier()  # else the death may come while another rank is still in its init
    total = torch.ones(1)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(total)
    except dist.PeerLost:
        dist.shrink()
        total = torch.ones(1)
        dist.all_reduce(total)
    print(dist.get_rank(), dist.get_world_size(), total.item())
"""


def test_survivors_go_on_where_the_job_keeps_going(job: Launching) -> None:
    done = job.run("--nproc", "3", "--keep-going", job.write(GOES_ON))
    assert done.code == 0, done.err
    assert (done.lines(0), done.lines(2)) == (["0 2 2.0"], ["1 2 2.0"])
    assert "rank 1" in done.err
    assert "SIGKILL" in done.err


def test_a_job_that_keeps_going_fails_with_all_its_ranks(job: Launching) -> None:
    assert job.run("-n", "2", "--keep-going", job.write("import sys; sys.exit(7)")).code == 7


ORPHANS = """
import os, time
orphan = os.popen("true > /dev/null & echo $!").read().strip()
while os.path.exists(f"/proc/{orphan}"):  # a zombie is there, too
    time.sleep(0.01)
"""


def test_orphans_of_a_rank_are_reaped_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_module, "_REAP_S", 0.02)
    program = tmp_path / "orphans.py"
    program.write_text(ORPHANS)
    assert run_job(JobSpec(program=str(program), nproc=1)).ok

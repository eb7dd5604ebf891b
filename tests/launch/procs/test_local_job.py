"""One host: hangs, replaced ranks, Ctrl-Z, probes, and events."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from dure.launch import JobSpec, launcher, run_job
from tests.launch.procs.launching import DURE, Launching, living, wait_for_lines
from tests.waiting import PATIENCE_S, free_port, until


def state_of(pid: int) -> str:
    """Return the letter of a process's state: T if it is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_round_that_hangs_shows_where_ranks_are_and_is_restarted(job: Launching) -> None:
    program = job.write("""
        import os, time
        def stuck():
            time.sleep(600)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            stuck()
        print("done")
    """)
    log = job.directory / "events.jsonl"
    flags = ("-n", "2", "--hang-timeout", "1", "--max-restarts", "1", "--event-log", log)
    done = job.run(*flags, program)
    assert done.code == 0, done.err
    assert (done.lines(0), done.lines(1)) == (["done"], ["done"])
    assert "it hung (no output, no step and no finished operation for 1 s)" in done.err
    assert done.err.count("in stuck") == 2  # once for each rank
    events = [json.loads(line) for line in log.read_text().splitlines()]
    order = [e["event"] for e in events if e["event"] not in ("started", "ended")]
    assert order == ["round", "hung", "restart", "round", "job ended"]
    restart = next(event for event in events if event["event"] == "restart")
    assert (restart["number"], restart["restarts"]) == (1, 1)


def test_a_rank_of_an_elastic_job_that_hangs_is_replaced(job: Launching) -> None:
    program = job.write("""
        import os, time
        def stuck():
            time.sleep(600)
        if os.environ["RANK"] == os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            stuck()
        while os.environ["RANK"] == "1" and not os.path.exists("replaced"):
            time.sleep(0.01)
        open("replaced", "w").close()
        print("done")
    """)
    flags = ("-n", "2", "--elastic", "--hang-timeout", "1", "--max-restarts", "1")
    done = job.run(*flags, program)
    assert done.code == 0, done.err
    assert (done.lines(0), done.lines(1)) == (["done"], ["done"])
    assert "rank 0 hangs" in done.err
    assert "in stuck" in done.err
    assert "replacement 1 of 1" in done.err


def test_ctrl_c_before_a_restart_names_no_rank_of_the_round_before(job: Launching) -> None:
    program = job.write("""
        import os, time
        while os.environ["RANK"] == "1":
            time.sleep(1)
        raise SystemExit(1)
    """)
    process = job.start("-n", "2", "--max-restarts", "9", program)
    while "starts in 2 s" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    done = job.finish(process)
    assert done.code == 130
    assert "rank " not in done.err


def test_a_hook_sees_the_events_and_kubernetes_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = tmp_path / "termination-log"
    reason.touch()
    monkeypatch.setattr(launcher, "_TERMINATION_LOG", reason)
    program = tmp_path / "prog.py"
    program.write_text("raise ValueError('wrong')")
    events: list[dict[str, object]] = []
    spec = JobSpec(
        program=str(program), max_restarts=1, quiet=True, stdin="none",
        log_dir=str(tmp_path / "logs"), event_log=str(tmp_path / "events"),  # pyright: ignore
        on_line=lambda line: None, on_event=lambda event: events.append(dict(event)),
    )  # fmt: skip
    assert run_job(spec).exit_code == 1
    names = ["round", "started", "crashed", "ended"]
    assert [event["event"] for event in events] == [*names, "restart", *names, "job ended"]
    assert events[4]["why"] == "raised ValueError: wrong"
    assert "failed first: it raised ValueError" in reason.read_text()
    assert (tmp_path / "logs/attempt_1/rank_0/error.json").exists()
    assert len((tmp_path / "events").read_text().splitlines()) == len(events)


def test_a_launcher_that_was_started_with_sigchld_ignored_sees_how_ranks_end(
    job: Launching,
) -> None:
    program = job.write("import sys; sys.exit(7)")
    start = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
    start += "os.execv(sys.executable, sys.argv[1:])"
    words = (sys.executable, "-c", start, *DURE, "run", "-n", "2", program)
    assert job.finish(job.start_any(*words)).code == 7


def test_ranks_can_be_replaced_without_end(job: Launching) -> None:
    """Each replaced rank held four descriptors, and 128 are few."""
    program = job.write("""
        import os, sys
        sys.exit(os.environ["TORCHELASTIC_RESTART_COUNT"] != "50")
    """)
    words = (*DURE, "run", "-n", "1", "--elastic", "--max-restarts", "60", program)
    done = job.finish(job.start_any("sh", "-c", 'ulimit -n 128; exec "$@"', "sh", *words))
    assert done.code == 0, done.err[-500:]
    assert "replacement 50 of 60 is started" in done.err


def test_a_rank_is_replaced_while_the_reader_of_its_output_waits(job: Launching) -> None:
    program = job.write("""
        import os
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
            raise SystemExit(0)
        open(os.environ["RANK"], "w").write(str(os.getpid()))
        while not os.path.exists("end"):
            print("x" * 5000)
    """)
    errors = job.directory / "errors"
    with errors.open("w") as file:
        flags = ("-n", "2", "--elastic", "--max-restarts", "1", "--no-fold")
        process = job.start(*flags, program, stderr=file)
    wait_for_lines(process, 1)

    written: list[list[str]] = []

    def all_wait() -> bool:
        """Whether the ranks have written nothing between many looks: the launcher reads no more."""
        pids = [file.read_text() for file in map(job.directory.joinpath, "01") if file.exists()]
        written.append([Path(f"/proc/{pid}/io").read_text() for pid in pids if pid])
        return len(written[-1]) == 2 and written[-50:] == [written[-1]] * 50

    until(all_wait, "ranks that wait for the reader")
    os.kill(int((job.directory / "1").read_text()), signal.SIGKILL)
    until(lambda: "replacement 1 of 1" in errors.read_text(), "a replacement")
    (job.directory / "end").touch()
    assert job.finish(process).code == 0, errors.read_text()


def test_ctrl_z_stops_the_ranks_and_fg_continues_them(job: Launching) -> None:
    program = job.write("""
        import subprocess
        child = subprocess.Popen(["sleep", "600"])
        print("up")
        child.wait()
    """)
    process = job.start("-n", "2", program)
    wait_for_lines(process, 2)

    def of_ranks() -> list[int]:
        """Two ranks and what they started; a new process shows its variables a moment later."""
        found = [pid for pid in living("RANK=") if pid in job.left()]
        return found if len(found) == 4 else []

    ranks = until(of_ranks, "four processes")

    def all_are(stopped: bool) -> bool:
        return all((state_of(pid) == "T") == stopped for pid in ranks)

    process.send_signal(signal.SIGTSTP)
    until(lambda: state_of(process.pid) == "T", "a stopped launcher")
    until(lambda: all_are(True), "stopped ranks")
    process.send_signal(signal.SIGCONT)
    until(lambda: all_are(False), "ranks that run")
    process.send_signal(signal.SIGTERM)
    assert job.finish(process).code == 128 + signal.SIGTERM


def test_a_probe_is_answered_at_torchs_port(job: Launching) -> None:
    port = free_port()
    environment = {"TORCHELASTIC_HEALTH_CHECK_PORT": str(port)}
    process = job.start(job.write("print('up'); input()"), env=environment, stdin=subprocess.PIPE)
    wait_for_lines(process, 1)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=PATIENCE_S) as answer:
        assert (answer.status, json.load(answer)) == (200, {"running": True})
    assert job.finish(process, stdin="\n").code == 0


@pytest.mark.needs("root")
def test_a_launcher_that_is_process_1_reaps_orphans_of_others(job: Launching) -> None:
    program = job.write("import time; print('up'); time.sleep(600)")
    isolated = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    process = job.start_any(*isolated, *DURE, "run", "-n", "2", program)
    wait_for_lines(process, 2)
    (launcher,) = children(process.pid)
    before = children(launcher)
    inside = (
        "nsenter",
        "--target",
        str(launcher),
        "--pid",
        "sh",
        "-c",
        "sleep 600 >/dev/null & true",
    )
    subprocess.run(inside, check=True, timeout=PATIENCE_S)
    adopted = set(children(launcher)) - set(before)
    assert len(adopted) == 1
    os.kill(adopted.pop(), signal.SIGKILL)
    until(lambda: children(launcher) == before, "an orphan that was reaped")
    os.kill(launcher, signal.SIGTERM)
    assert job.finish(process).code == 128 + signal.SIGTERM


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]

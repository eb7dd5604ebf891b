"""`dure run --metrics-port`: what is scraped from jobs that run."""

import urllib.request
from collections.abc import Callable

from tests.launch.procs.launching import Launching
from tests.launch.prometheus_text import Key, parsed
from tests.waiting import until

# Rank 1 begins the last collective only when rank 0 is about to. Then both wait for the test.
PROGRAM = """
    import os, time
    import torch, dure

    def wait_for(name):
        while not os.path.exists(name):
            time.sleep(0.01)

    dure.init_process_group()
    rank = dure.get_rank()
    for step in range(1, 6):
        dure.all_reduce(torch.ones(250))
        dure.progress(step, total=5)
    if rank == 0:
        open("entering", "w").close()
    else:
        wait_for("entering")
        time.sleep(2)  # rank 0 is waiting by then, also on a busy machine
    dure.all_gather_object([None, None], rank)
    wait_for("seen")
    dure.destroy_process_group()
"""
FAILS_ONCE = """
    import os, time
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise SystemExit(3)
    while not os.path.exists("seen"):
        time.sleep(0.01)
"""


def _scraped_until(port: int, shows: Callable[[dict[Key, float]], bool]) -> dict[Key, float]:
    """Scrape until that is so; the text must be valid each time."""

    def scrape() -> dict[Key, float] | None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                found = parsed(answer.read().decode())
        except OSError:  # the launcher is not yet there
            return None
        return found if shows(found) else None

    found = until(scrape)
    assert found is not None
    return found


def _of(rank: int, **labels: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((labels | {"rank": str(rank)}).items()))


def test_operations_steps_memory_and_waiting_of_a_running_job_are_scraped(
    job: Launching, port: int
):
    started = job.start("--nproc", "2", "--metrics-port", str(port), job.write(PROGRAM))

    def is_there(found: dict[Key, float]) -> bool:
        counts = [found.get(("dure_operations_total", _of(r, op="all_reduce")), 0) for r in (0, 1)]
        return min(counts) >= 5 and ("dure_rank_wait_seconds_total", _of(0)) in found

    found = _scraped_until(port, is_there)
    (job.directory / "seen").touch()
    assert job.finish(started).code == 0
    for rank in (0, 1):
        assert found["dure_operations_total", _of(rank, op="all_reduce")] == 5
        assert found["dure_operation_bytes_total", _of(rank, op="all_reduce")] == 5 * 1000
        assert found["dure_operation_seconds_total", _of(rank, op="all_reduce")] > 0
        assert found["dure_operation_failures_total", _of(rank, op="all_reduce")] == 0
        assert found["dure_operations_unseen_total", _of(rank)] == 0
        assert found["dure_rank_step", _of(rank)] == 5
        assert found["dure_rank_up", _of(rank)] == 1
        assert found["dure_rank_restarts_total", _of(rank)] == 0
        assert found["dure_rank_memory_bytes", _of(rank)] > 50e6  # torch alone is more
        assert found["dure_rank_waits_total", _of(rank)] >= 5


def test_a_rank_that_came_later_has_let_the_other_wait(job: Launching, port: int):
    started = job.start("--nproc", "2", "--metrics-port", str(port), job.write(PROGRAM))

    def has_waited(found: dict[Key, float]) -> bool:
        return found.get(("dure_rank_wait_seconds_total", _of(0)), 0) >= 0.02

    _scraped_until(port, has_waited)
    (job.directory / "seen").touch()
    assert job.finish(started).code == 0


def test_restarts_are_counted(job: Launching, port: int):
    program = job.write(FAILS_ONCE)
    started = job.start("--nproc", "1", "--max-restarts", "1", "--metrics-port", str(port), program)
    _scraped_until(port, lambda found: found.get(("dure_rank_restarts_total", _of(0))) == 1)
    (job.directory / "seen").touch()
    assert job.finish(started).code == 0


def test_a_bad_port_is_refused_before_a_rank_starts(job: Launching):
    program = job.write("print('started')")
    ended = job.run("--metrics-port", "70000", program)
    assert ended.code == 2
    assert "--metrics-port" in ended.err
    assert "70000" in ended.err
    assert "started" not in ended.out


def test_without_the_flag_ranks_have_no_thread_and_no_folder(job: Launching):
    program = job.write("""
        import os, threading, dure
        dure.init_process_group()
        assert "DURE_METRICS_DIR" not in os.environ
        print([t.name for t in threading.enumerate() if "metrics" in t.name])
        dure.destroy_process_group()
    """)
    ended = job.run("--nproc", "1", program)
    assert (ended.code, ended.lines(0)) == (0, ["[]"]), ended.err

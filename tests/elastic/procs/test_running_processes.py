"""Elastic jobs of real processes: ranks are killed, stopped and asked to end.

Where a kill happens is part of the program (`programs/elastic_job.py`), so nothing here waits.
"""

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import dure
from dure.comm.world import new_world
from dure.elastic import preempt
from dure.store import HashStore
from dure.testing import ProcessPool, run_ranks
from tests.elastic.procs.programs.elastic_job import STEPS, make_state, train
from tests.launch.procs.launching import Launching, wait_for_lines
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.needs("engine")

PROGRAM = str(Path(__file__).parent / "programs" / "elastic_job.py")


@pytest.fixture(scope="module")
def expected() -> list[float]:
    """Return the weights of one rank that nobody disturbs."""

    def alone(rank: int) -> list[float] | None:
        with new_world():
            options = dure.elastic.Options(store=HashStore(), rank=0, world_size=1)
            return dure.elastic.run(train, make_state(), options)

    return run_ranks(1, alone)[0] or []


Fault = tuple[int, str, str]


def results(
    job: Launching, nproc: int, *faults: Fault, more: tuple[str, ...] = (), **env: str
) -> Any:
    """Run a job with these faults; return its exit code, and what its ranks tell, by rank."""
    plan = [{"rank": rank, "at": at, "do": do} for rank, at, do in faults]
    finished = job.run(
        # The module is what the first optimizer of a process imports, for a second.
        *("--nproc", str(nproc), "--elastic", "--preload", "torch._dynamo", *more, PROGRAM),
        env={"ELASTIC_FAULTS": json.dumps(plan)} | env,
    )
    lines = [line.partition("RESULT ")[2] for line in finished.out.splitlines()]
    told = {one["rank"]: one for one in map(json.loads, filter(None, lines))}
    assert told, finished.err
    assert "no rank has called" not in finished.err
    return finished.code, told


def check(told: dict[int, Any], ranks: set[int], expected: list[float]) -> None:
    """No sample is lost or seen twice, no process is new, and the model is the undisturbed one."""
    assert set(told) == ranks
    for one in told.values():
        assert one["once"] and one["steps"] == STEPS
        assert one["same_process"]
        assert one["weights"] == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_the_living_go_on(job: Launching, expected: list[float]):
    """Two die with rank 0, one while the next group is made, one in a commit, one in a recovery."""
    faults: list[Fault] = [
        (0, "step 5", "KILL"),
        (3, "step 5", "KILL"),
        (4, "form 1", "KILL"),
        (1, "staged 10", "KILL"),
        (2, "agree 3", "KILL"),
    ]
    code, told = results(job, 6, *faults)
    assert code == 0
    check(told, {5}, expected)


def test_down_to_one_rank_and_up_again(job: Launching, expected: list[float]):
    more = ("--max-restarts", "1")
    code, told = results(job, 2, (0, "step 4", "KILL"), more=more, ELASTIC_WAIT="2")
    assert code == 0
    check(told, {0, 1}, expected)
    lost, joined = zip(*told[1]["recoveries"], strict=True)
    assert (sum(lost), sum(joined)) == (1, 1)  # in one recovery, if the new rank came soon


@pytest.mark.parametrize("died", [False, True])
def test_a_program_that_does_not_recover_by_itself_is_named_so_once(job: Launching, died: bool):
    program = job.write("""
        import os, sys
        sys.exit("died" in sys.argv and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0")
        """)
    words = ["died"] if died else []
    ended = job.run("--nproc", "1", "--elastic", "--max-restarts", "1", program, *words)
    assert ended.code == 0
    assert ended.err.count("no rank has called dure.elastic.run") == 1
    assert ("replacement 1 of 1" in ended.err) == died


def test_a_rank_that_waits_for_a_group_does_not_hang(job: Launching):
    """Two are needed, and the one that replaces rank 1 is late, by twice the hang timeout."""
    program = job.write("""
        import os, sys, time
        import dure

        again = os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
        if again and os.environ["RANK"] == "1":
            time.sleep(4)

        def train(state):
            if os.environ["RANK"] == "1" and not again:
                os._exit(1)
            state.commit()
            return dure.get_world_size()

        options = dure.elastic.Options(min_ranks=2)
        print("ranks", dure.elastic.run(train, dure.elastic.State(), options))
        """)
    flags = ("--elastic", "--max-restarts", "1", "--hang-timeout", "2", "--preload", "dure.elastic")
    ended = job.run("--nproc", "2", *flags, program)
    assert ended.code == 0, ended.err
    assert (ended.lines(0), ended.lines(1)) == (["ranks 2"], ["ranks 2"])


SAVING = """
    import os, pathlib, sys, time
    import dure

    @dure.elastic.on_preempt
    def save():
        dure.barrier()  # all are here, after the same step
        pathlib.Path(f"{sys.argv[1]}-{os.environ['RANK']}").write_text(str(steps))

    steps = 0

    def train(state):
        global steps
        print(f"up {os.getpid()}", flush=True)
        while True:
            time.sleep(0.01)  # leaves the cores to the other job
            state.commit()
            steps = state.commits

    if sys.argv[1] == "run":
        dure.elastic.run(train, dure.elastic.State())
    else:
        dure.init_process_group()
        print(f"up {os.getpid()}", flush=True)
        while not dure.elastic.preempted():
            time.sleep(0.01)
            steps += 1
"""


def test_sigterm_to_all_processes_lets_all_ranks_save_after_the_same_step(job: Launching):
    program = job.write(SAVING)
    words = ("--nproc", "2", "--preload", "dure.elastic", program)
    jobs = {mode: job.start(*words, mode) for mode in ("run", "loop")}
    for started in jobs.values():
        wait_for_lines(started, 2)
    for pid in job.left():  # as systemd does: every process, and SIGHUP as well
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    for started in jobs.values():
        started.send_signal(signal.SIGHUP)
    for mode, started in jobs.items():
        _, err = started.communicate(timeout=PATIENCE_S)
        assert started.returncode == 128 + signal.SIGTERM, err
        saved = [(job.directory / f"{mode}-{rank}").read_text() for rank in range(2)]
        assert saved[0] == saved[1] and int(saved[0]) > 0


def _forks(rank: int) -> tuple[int, bool]:
    """Fork, as a loader does for a worker, which is told to end; return how that ended."""
    preempt.watch()
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status, preempt.asked()


def test_a_process_that_was_forked_ends_when_it_is_told_to():
    with ProcessPool(1) as pool:
        assert pool.run(_forks) == [(-signal.SIGTERM, False)]

"""Ways into RPC: where workers meet, and one that is killed and comes again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from dure import rpc
from dure.rpc.current import current
from dure.store import FileStore
from tests.launch.procs.launching import Launching
from tests.rpc.procs.rpc_workers import Start, double, workers
from tests.waiting import key_file, until

pytestmark = pytest.mark.needs("engine")

COMES_AGAIN = str(Path(__file__).parent / "programs/rpc_comes_again.py")


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    if rpc._is_current_rpc_agent_set():
        rpc.shutdown(graceful=False)


@pytest.mark.parametrize(
    ("way", "dynamic"), [("env", False), ("tcp", True), ("file", False)], ids=["env", "tcp", "file"]
)
def test_workers_meet(
    way: str, dynamic: bool, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third one comes later, where workers come and go."""
    size = 3 if dynamic else 2
    key = str(key_file(tmp_path / "key"))
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DURE_JOB_KEY_FILE": key}
    url = {"env": "env://", "tcp": f"tcp://127.0.0.1:{port}", "file": f"file://{tmp_path}/meeting"}

    def start(rank: int) -> Start:
        numbers = {"RANK": str(rank), "WORLD_SIZE": str(size)}
        return Start(
            name=f"worker{rank}",
            rank=-1 if way == "env" else rank,
            world_size=None if dynamic else -1 if way == "env" else 2,
            url=url[way],
            variables=where | numbers,
        )

    for name in (*where, "RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # put back afterwards
    with workers(start(1)) as (other,):
        start(0).init()
        assert other.joined() == 1
        assert rpc.rpc_sync("worker1", double, (21,)) == 42
        if dynamic:
            with workers(start(2)) as (late,):
                assert late.joined() == 2
                until(lambda: len(current().workers) == 3, "the third worker")
                assert rpc.rpc_sync("worker2", double, (4,)) == 8
                late.leave()
                late.left()
        other.leave()
        rpc.shutdown()
        other.left()


def test_workers_meet_in_a_store_of_their_own(tmp_path: Path) -> None:
    start = Start(name="b", rank=1, world_size=2, store=str(tmp_path / "own"))
    with closing(FileStore(tmp_path / "own", -1)) as store, workers(start) as (other,):
        rpc.init_rpc("a", rank=0, world_size=2, store=store)
        assert other.joined() == 1
        assert rpc.rpc_sync("b", double, (1,)) == 2
        other.leave()
        rpc.shutdown()
        other.left()


def test_a_worker_that_dies_comes_again_under_dure_run_elastic(job: Launching) -> None:
    seen = job.directory / "seen.json"
    done = job.run("--nproc", "3", "--elastic", "--max-restarts", "3", COMES_AGAIN, str(seen))
    assert done.code == 0, done.out + done.err
    report = json.loads(seen.read_text())
    assert report["lost"] == "PeerLost"
    assert "worker1" in report["text"]
    assert "SIGKILL" in report["text"]
    assert (report["other"], report["again"]) == (8, 42)
    old, new = report["ids"]
    assert old != new

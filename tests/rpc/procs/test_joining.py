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


def test_workers_meet_by_the_variables_of_a_launcher(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DURE_JOB_KEY_FILE": str(key_file(tmp_path / "key")),
        "WORLD_SIZE": "2",
    }

    def start(rank: int) -> Start:
        variables = where | {"RANK": str(rank)}
        return Start(name=f"worker{rank}", world_size=-1, url="env://", variables=variables)

    for name in (*where, "RANK"):
        monkeypatch.setenv(name, "")  # put back afterwards
    with workers(start(1)) as (other,):
        start(0).init()
        assert other.joined() == 1
        assert rpc.rpc_sync("worker1", double, (21,)) == 42
        other.leave()
        rpc.shutdown()
        other.left()


def test_a_worker_comes_later_and_leaves_before_the_others(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/meeting"
    Start(name="worker0", url=url).init()
    with workers(Start(name="worker1", url=url)) as (late,):
        assert late.joined() == 1
        until(lambda: len(current().workers) == 2, "the other worker")
        assert rpc.rpc_sync("worker1", double, (4,)) == 8
        late.leave()
        late.left()
    rpc.shutdown()


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

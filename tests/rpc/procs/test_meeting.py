"""Ways into RPC, and out of it: where workers meet, who dies at the end, hosts that are cut off."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dure import rpc
from dure.rpc.current import current
from dure.store import FileStore
from tests.comm.namespace_hosts import hosts, start_job
from tests.launch.procs.launching import Launching, launching
from tests.rpc.procs.rpc_workers import Start, double, workers
from tests.waiting import key_file, until

pytestmark = pytest.mark.needs("engine")

PROGRAMS = Path(__file__).parent / "programs"
OVER_HOSTS, COMES_AGAIN = PROGRAMS / "rpc_over_hosts.py", str(PROGRAMS / "rpc_comes_again.py")


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launching]:
    yield from launching(tmp_path)


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
    store = FileStore(tmp_path / "own", -1)
    with workers(Start(name="b", rank=1, world_size=2, store=str(tmp_path / "own"))) as (other,):
        rpc.init_rpc("a", rank=0, world_size=2, store=store)
        assert other.joined() == 1
        assert rpc.rpc_sync("b", double, (1,)) == 2
        other.leave()
        rpc.shutdown()
        other.left()


@pytest.mark.slow
@pytest.mark.needs("network namespaces")
def test_a_host_that_is_cut_off_is_lost_after_its_silence(tmp_path: Path) -> None:
    """The call under way may have run; from then on the worker is gone. Others are called."""
    with hosts(3, "rpc") as made:
        ranks = start_job(made, 1, [OVER_HOSTS, tmp_path], tmp_path / "key")
        until((tmp_path / "calling").exists, "the call to be under way")
        made[1].cut()
        out = ranks[0].communicate()[1]
        assert ranks[0].returncode == 0, out
    seen = json.loads((tmp_path / "0.json").read_text())
    assert seen["first"].startswith("RpcError: the connection to worker 'worker1' broke")
    assert "may have run" in seen["first"]
    assert seen["later"].startswith("PeerLost: worker 'worker1' (id 1) is gone")
    assert seen["seconds"] > 2  # for so long it is looked for when the connection is broken
    assert seen["others"] == 42


def test_a_worker_that_dies_comes_again_under_dure_run_elastic(launcher: Launching) -> None:
    seen = launcher.directory / "seen.json"
    done = launcher.run("--nproc", "3", "--elastic", "--max-restarts", "3", COMES_AGAIN, str(seen))
    assert done.code == 0, done.out + done.err
    report = json.loads(seen.read_text())
    assert report["lost"] == "PeerLost"
    assert "worker1" in report["text"]
    assert "SIGKILL" in report["text"]
    assert (report["other"], report["again"]) == (8, 42)
    old, new = report["ids"]
    assert old != new

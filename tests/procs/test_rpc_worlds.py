"""Ways into RPC, and out of it: where workers meet, who dies at the end, hosts that are cut off."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dure import native, rpc
from dure.rpc.current import current
from dure.store import FileStore
from procs.hosts import hosts, start_job, why_not
from procs.launching import Launching, launching
from procs.rpc_workers import Start, double, nap, workers
from waiting import free_port, key_file, until

pytestmark = pytest.mark.skipif(not native.available()[0], reason="needs the native engine")

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


@pytest.mark.parametrize("dynamic", [False, True], ids=["ranks", "dynamic"])
@pytest.mark.parametrize("way", ["env", "tcp", "file"])
def test_workers_meet(
    way: str, dynamic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third one comes later, where workers come and go."""
    port, size = free_port(), 3 if dynamic else 2
    key = str(key_file(tmp_path / "key"))
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DURE_JOB_KEY_FILE": key}
    url = {"env": "env://", "tcp": f"tcp://127.0.0.1:{port}", "file": f"file://{tmp_path}/meeting"}
    world = None if dynamic else 2

    def start(rank: int) -> Start:
        numbers = {"RANK": str(rank), "WORLD_SIZE": str(size)}
        return Start(
            name=f"worker{rank}",
            rank=-1 if way == "env" and not dynamic else rank,
            world_size=-1 if way == "env" and not dynamic else world,
            url=url[way],
            variables=where | numbers,
        )

    for name in (*where, "RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # put back afterwards
    with workers(start(1)) as others:
        start(0).init()
        assert others[0].said() == 1
        assert rpc.rpc_sync("worker1", double, (21,)) == 42
        if dynamic:
            with workers(start(2)) as late:
                assert late[0].said() == 2
                until(lambda: len(current().workers) == 3, "the third worker")
                assert rpc.rpc_sync("worker2", double, (4,)) == 8
                late[0].pipe.send(True)
                assert late[0].said() == "ended"
        others[0].pipe.send(True)
        rpc.shutdown()
        assert others[0].said() == "ended"


def test_workers_meet_in_a_store_of_their_own(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "own", -1)
    with workers(Start(name="b", rank=1, world_size=2, store=str(tmp_path / "own"))) as others:
        rpc.init_rpc("a", rank=0, world_size=2, store=store)
        assert others[0].said() == 1
        assert rpc.rpc_sync("b", double, (1,)) == 2
        others[0].pipe.send(True)
        rpc.shutdown()
        assert others[0].said() == "ended"


@pytest.mark.parametrize("leads", [False, True], ids=["another", "leader"])
def test_who_dies_during_a_graceful_shutdown_counts_as_done(leads: bool, tmp_path: Path) -> None:
    """The leader is the first by name; the others wait for a call that runs still."""
    names = ["b", "a", "c"] if leads else ["a", "b", "c"]  # the second one dies
    starts = [
        Start(name=name, rank=rank, world_size=3, url=f"file://{tmp_path}/meeting")
        for rank, name in enumerate(names)
    ]
    with workers(*starts[1:]) as (dies, lives):
        starts[0].init()
        assert (dies.said(), lives.said()) == (1, 2)
        running = rpc.rpc_async("c", nap, (1.0,))
        dies.pipe.send(True)
        lives.pipe.send(True)
        dies.process.join(0.3)  # it has come to the end by now, and waits for the others
        assert dies.process.is_alive()
        dies.process.kill()
        rpc.shutdown()
        assert running.done()
        assert running.value() == 1.0
        assert lives.said() == "ended"


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
def test_a_host_that_is_cut_off_is_lost_after_ten_seconds(tmp_path: Path) -> None:
    """The call under way may have run; from then on the worker is gone. Others are called."""
    with hosts(3, "rpc") as made:
        ranks = start_job(made, 1, [OVER_HOSTS, tmp_path], tmp_path / "key")
        until((tmp_path / "calling").exists, "the call to be under way", 60)
        made[1].cut()
        out = ranks[0].communicate(timeout=90)[1]
        assert ranks[0].returncode == 0, out
    seen = json.loads((tmp_path / "0.json").read_text())
    assert seen["first"].startswith("RpcError: the connection to worker 'worker1' broke")
    assert "may have run" in seen["first"]
    assert seen["later"].startswith("PeerLost: worker 'worker1' (id 1) is gone")
    assert 10 < seen["seconds"] < 40
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

"""The store in etcd, with real members that are killed, silent, or ask for a password."""

import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from dure.errors import StoreError, StoreLost, StoreRefused, StoreTimeout, UsageError
from dure.store.etcd import MAX_ETCD_BYTES, EtcdStore
from dure.store.etcd_gateway import EtcdConnection, EtcdOptions, Gateway
from dure.store.etcd_requests import Json
from tests.store.procs import etcd
from tests.store.procs.relay import Relay
from tests.store.procs.store_programs import line, running
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.needs("etcd")
TIMEOUT = timedelta(seconds=PATIENCE_S)


@pytest.fixture(scope="module")
def one() -> Iterator[etcd.Etcd]:
    with etcd.etcd() as it:
        yield it


def test_a_member_is_killed_and_another_falls_silent() -> None:
    """Of three; two threads count meanwhile, one waits for a key."""
    with etcd.etcd(3) as cluster, ThreadPoolExecutor(3) as pool:
        store = EtcdStore.from_url(f"etcd://{cluster.names}/job", TIMEOUT)
        hasty = EtcdStore.from_url(store.url, TIMEOUT)
        hasty.set_timeout(timedelta(seconds=0.5))
        late = pool.submit(store.get, "late")
        counts = [pool.submit(lambda: [store.add("n", 1) for _ in range(60)]) for _ in range(2)]
        store.get("n")
        cluster.kill(0)
        store.set("one is dead", "")
        cluster.start_again(0)
        cluster.await_healthy()
        cluster.pause(1)  # as one whose network is cut: its connections stand, nothing comes
        for number in range(3):
            store.set(f"one is silent {number}", "")
        cluster.kill(0)  # and now there is no majority
        with pytest.raises((StoreLost, StoreTimeout)):
            hasty.set("nobody decides", "")
        hasty.close()
        cluster.go_on(1)
        store.set("late", "!")
        assert late.result() == b"!"
        counted = [n for some in counts for n in some.result()]
        assert sorted(counted) == list(range(1, 121))
        store.close()


def test_a_write_whose_answer_was_lost_is_done_once(one: etcd.Etcd) -> None:
    """Of each connection the third packet is an answer, and is lost with the connection."""
    port = int(one.endpoints[0].rpartition(":")[2])
    with Relay(port, lose=3) as relay:
        store = EtcdStore.from_url(f"etcd://127.0.0.1:{relay.port}/lost-answers", TIMEOUT)
        assert [store.add("n", 1) for _ in range(10)] == list(range(1, 11))
        for _ in range(3):
            store.append("text", "x")
        assert store.get("text") == b"xxx"
        assert store.delete_key("text")
        assert relay.lost > 10
        store.close()


def test_a_write_that_arrives_late_does_nothing(
    one: etcd.Etcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was on its way for so long that its writer has given it up and asked again."""
    sent: list[tuple[str, Json]] = []
    ask = EtcdConnection.ask

    def recording(self: EtcdConnection, path: str, body: Json, answer_s: float = 5.0) -> Json:
        sent.append((path, body))
        return ask(self, path, body, answer_s)

    store = EtcdStore.from_url(f"etcd://{one.names}/late", TIMEOUT)
    monkeypatch.setattr(EtcdConnection, "ask", recording)
    store.set("k", "1")
    late = sent[-1]
    store.set("k", "2")
    monkeypatch.undo()
    connection = Gateway(EtcdOptions(endpoints=tuple(one.endpoints))).connection()
    assert "compare" in late[1]
    assert not connection.ask(*late).get("succeeded")
    assert store.get("k") == b"2"
    connection.close()
    store.close()


def test_a_password_and_tokens_that_expire(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.touch(0o600)
    password.write_text("secret\n")
    with etcd.etcd(flags=["--auth-token-ttl=1"]) as server:
        server.ask("auth/user/add", {"name": "root", "password": "secret"})
        server.ask("auth/role/add", {"name": "root"})
        server.ask("auth/user/grant", {"user": "root", "role": "root"})
        server.ask("auth/enable", {})
        url = f"etcd://{server.names}/job"
        store = EtcdStore.from_url(f"{url}?user=root&password_file={password}", TIMEOUT)
        time.sleep(2.5)
        assert store.add("n", 1) == 1  # the token has expired, and is asked for again
        store.close()
        password.write_text("wrong\n")
        for words in ("", f"?user=root&password_file={password}", "?user=nobody"):
            with pytest.raises(StoreRefused) as caught:
                EtcdStore.from_url(url + words, TIMEOUT)
            assert "\n" not in str(caught.value)
        password.chmod(0o644)
        with pytest.raises(StoreError) as told:
            EtcdStore.from_url(f"{url}?user=root&password_file={password}", TIMEOUT)
        assert "chmod 600" in told.value.fix


def test_tls_on_both_sides(tmp_path: Path) -> None:
    authority, server = made(tmp_path, "authority"), made(tmp_path, "server", "authority")
    client = made(tmp_path, "client", "authority")
    files = [f"--cert-file={server}.pem", f"--key-file={server}.key", "--client-cert-auth"]
    files += [f"--trusted-ca-file={authority}.pem"]
    with etcd.etcd(flags=files, scheme="https") as it:
        trust = f"cacert={authority}.pem"
        url = f"etcd://{it.names}/job"
        store = EtcdStore.from_url(f"{url}?{trust}&cert={client}.pem&key={client}.key", TIMEOUT)
        store.set("k", "v")
        assert store.get("k") == b"v"
        again = EtcdStore.from_url(store.url, TIMEOUT)
        assert again.get("k") == b"v"
        again.close()
        with pytest.raises(StoreRefused):
            EtcdStore.from_url(f"{url}?{trust}", TIMEOUT)  # we have no certificate
        other = made(tmp_path, "other")
        with pytest.raises(StoreRefused):
            EtcdStore.from_url(f"{url}?cacert={other}.pem", TIMEOUT)  # we do not trust theirs
        store.close()


def made(folder: Path, name: str, signer: str = "") -> Path:
    """Make a certificate and its key: NAME.pem and NAME.key."""
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    words += ["-nodes", "-days", "2", "-subj", f"/CN={name}", "-keyout", f"{name}.key"]
    words += ["-addext", "subjectAltName=IP:127.0.0.1", "-out", f"{name}.pem"]
    if signer:
        words += ["-CA", f"{signer}.pem", "-CAkey", f"{signer}.key"]
        words += ["-addext", "basicConstraints=critical,CA:FALSE"]
        words += ["-addext", "extendedKeyUsage=serverAuth,clientAuth"]
    subprocess.run(words, cwd=folder, check=True, capture_output=True)
    return folder / name


def test_a_value_that_etcd_would_not_take_is_refused(one: etcd.Etcd) -> None:
    store = EtcdStore.from_url(f"etcd://{one.names}/long", TIMEOUT)
    store.multi_set(["a", "b", "c"], [bytes(MAX_ETCD_BYTES)] * 3)
    for write in (store.set, store.append):
        with pytest.raises(UsageError):
            write("d", bytes(MAX_ETCD_BYTES + 1))
    with pytest.raises(UsageError):
        store.append("a", "1")
    store.clear()
    store.set("after", "1")
    assert store.list_keys() == ["after"]
    store.close()


def test_ranks_meet_in_etcd_and_the_last_clears_its_keys(one: etcd.Etcd) -> None:
    code = """
meeting = rendezvous(args[0] + "?rank=" + args[1] + "&world_size=2")
meeting.store.set(args[1], args[1])
meeting.store.wait(["0", "1"])
meeting.close()
say("met", meeting.world_size)
"""
    url = f"etcd://{one.names}/meeting"
    with running((code, url, "0"), (code, url, "1")) as programs:
        assert [line(each) for each in programs] == ["met 2", "met 2"]
    store = EtcdStore.from_url(url, TIMEOUT)
    assert store.list_keys() == []
    store.close()

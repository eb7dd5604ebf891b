"""The way to etcd: addresses, and when it is encrypted; no etcd is needed."""

from datetime import timedelta

import pytest

from dure.errors import StoreTimeout, UsageError
from dure.store import EtcdStore
from dure.store.etcd_gateway import EtcdOptions, Gateway


@pytest.mark.parametrize(
    "url", ["etcd://h:2379", "etcd://h:x/job", "etcd:///job", "etcd://u:p@h/job", "etcd://h/j?x=1"]
)
def test_addresses_that_make_no_sense_are_refused(url: str) -> None:
    with pytest.raises(UsageError):
        EtcdOptions.from_url(url)


def test_passwords_and_keys_never_go_out_in_the_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(*endpoints: str) -> bool:
        return Gateway(EtcdOptions(endpoints=endpoints))._tls is None

    assert plain("127.0.0.1:2379", "localhost", "[::1]:2379")
    assert not plain("127.0.0.1", "10.0.0.1")
    monkeypatch.setenv("DURE_INSECURE", "1")
    assert plain("10.0.0.1")


def test_nobody_there_and_nobody_that_is_etcd() -> None:
    with pytest.raises(StoreTimeout) as caught:
        EtcdStore.from_url("etcd://127.0.0.1:1/job", timedelta(seconds=0.2))
    assert "\n" not in str(caught.value)
    assert "127.0.0.1:1" in caught.value.what

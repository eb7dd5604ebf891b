"""Connections to the job's state: to the coordinator's launcher, or to etcd."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from dure.errors import StoreError, StoreTimeout
from dure.launch.agent.messages import (
    Answer,
    Control,
    Message,
    other_build,
    pack,
    read_answer,
)
from dure.store.key import JobKey
from dure.store.network import NetworkStore
from dure.store.silence import silence_s
from dure.store.wire import StoreRequest

__all__ = ["CoordinatorClient", "open_control"]


class CoordinatorClient(NetworkStore):
    """Connections to the coordinator at an endpoint.

    Args:
        endpoint: Where it is.
        secret: The key of its server.
        patience_s: How long it may take to answer the first request.

    Raises:
        UsageError: It is of another build of Dure.
    """

    def __init__(self, endpoint: str, secret: bytes, patience_s: float) -> None:
        # An answer is waited for on the same connection: closing it would look like a death.
        timeout = timedelta(seconds=silence_s() / 2)
        super().__init__(endpoint, JobKey(secret), timeout, patience_s=patience_s)
        if self._other_build:
            self.close()
            raise other_build(self._other_build)

    def ask(self, message: Message, timeout_s: float = 0.0) -> Answer:
        request = StoreRequest("control", values=(pack(message),), timeout_s=timeout_s)
        reply = self._answered(request, timeout_s or self.timeout.total_seconds())
        if reply is None:
            raise StoreTimeout(f"{self._named} did not answer", op="control", keys=())
        if reply.status != "ok":
            raise StoreError(f"{self._named} refused a request", op="control", seen=reply.text)
        return read_answer(b"".join(reply.values))

    def has_ended(self) -> bool:
        return self.server_has_ended()


def open_control(endpoint: str, secret: bytes, patience_s: float) -> Control:
    """Connect to the job's state: etcd://..., or a coordinator (tcp://...).

    Raises:
        StoreError: No server answers there, or it has another key or password.
    """
    if not endpoint.startswith("etcd://"):
        return CoordinatorClient(endpoint, secret, patience_s)
    from dure.launch.agent.etcd import EtcdControl  # lazy: few jobs use it, and it brings ssl
    from dure.store.etcd_gateway import EtcdOptions  # lazy: as before

    options, job = EtcdOptions.from_url(endpoint)
    return EtcdControl(replace(options, password=secret.decode()), job, patience_s)

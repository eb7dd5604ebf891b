"""The store in etcd: for a job that outlives any of its hosts.

Keys of a job lie below ``/dure/JOB/keys/``. Each call is one transaction, or a few that begin again
when another rank was quicker.

A write whose answer was lost is settled, never guessed. Each writer, that is, each connection in
use, has a key of its own below ``/dure/JOB/writers/``. Every transaction expects in it the nonce of
the writer's last one, and puts there a new nonce and whether the transaction's own conditions held.
After an answer that did not come, the same transaction is sent again. Either it is the first to
arrive: then the lost one will never be carried out, for its condition no longer holds. Or the
writer's key has the lost one's nonce, and the outcome with it. So `add` never counts twice.

A watch without an event is opened again at the next member after `QUIET_S`: the first may be cut
off from its cluster.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import threading
import time
from collections.abc import Generator, Sequence
from datetime import timedelta

from dure.errors import StoreError, StoreLost, StoreTimeout, UsageError
from dure.store.asking import AskingStore
from dure.store.base import DEFAULT_TIMEOUT
from dure.store.board import Board
from dure.store.etcd_gateway import (
    ANSWER_S,
    EtcdOptions,
    EtcdWatch,
    Gateway,
    Unanswered,
)
from dure.store.etcd_requests import (
    Json,
    KeyValue,
    decode,
    delete,
    encode,
    has_revision,
    has_value,
    keys_below,
    put,
    range_below,
)
from dure.store.wire import Reply, StoreRequest

__all__ = ["MAX_ETCD_BYTES", "EtcdStore"]

MAX_ETCD_BYTES = 1 << 20
"""The longest value; etcd itself takes no request above 1.5 MiB."""

_USERS = "dure/users"
_MOST_READS = 100
"""Keys in one transaction; etcd takes 128 steps."""

_PAUSE_S = 0.05
_CROWD_S, _MOST_CROWD_S = 0.002, 1.0
"""How long a writer that lost a race for a key waits, at first and at most. It doubles with each
lost race, so n writers of one key need some n log n transactions together."""

_LOST_S = 30.0
"""Members that answered once are asked for so long before etcd counts as lost."""


class EtcdStore(AskingStore):
    """The keys of one job in an etcd cluster.

    Args:
        options: Where etcd is; see `EtcdOptions`, and its `from_url`.
        job: The job's name, which no other job in this etcd may have.
        timeout: How long `get`, `wait` and the first connection wait.
        last_clears: Whether to count the stores that are opened so, and the last to close clears
            the keys; else they stay until `clear`.

    Raises:
        StoreTimeout: No member answers.
        StoreRefused: The name, the password or a certificate is wrong, or the user may not.
        UsageError: A value is longer than 1 MiB.

    Threads:
        Any number may use one store. A forked child may use it too.

    Cost:
        A round trip and, for a write, a majority's disk, so 1 to 10 ms per call. If n ranks add to
        one key at once, the last one needs up to n round trips.

    Example:
        ```python
        from datetime import timedelta
        from dure.store.etcd_gateway import EtcdOptions

        try:
            options = EtcdOptions(endpoints=("127.0.0.1:9",))
            store = dist.EtcdStore(options, job="mine", timeout=timedelta(seconds=1))
        except dist.StoreTimeout as error:  # no etcd is at this address
            print(error)
        ```
    """

    def __init__(
        self,
        options: EtcdOptions,
        job: str,
        timeout: timedelta = DEFAULT_TIMEOUT,
        last_clears: bool = False,
    ) -> None:
        super().__init__(timeout)
        self._gateway = Gateway(options)
        self._options, self._job = options, job
        self._root = f"/dure/{job}/"
        self._keys = f"{self._root}keys/"
        self._met = self._closed = False
        self._last_clears = last_clears
        self._start_afresh()
        self.num_keys()
        self._met = True
        if last_clears:
            self.add(_USERS, 1)

    def clone(self) -> EtcdStore:
        return EtcdStore(self._options, self._job, self._timeout, self._last_clears)

    @classmethod
    def from_url(
        cls, url: str, timeout: timedelta = DEFAULT_TIMEOUT, last_clears: bool = False
    ) -> EtcdStore:
        """Open ``etcd://HOST:PORT[,HOST:PORT]/JOB[?cacert=...&cert=...&key=...&user=...]``.

        The password is in the file `password_file=`, or in the descriptor DURE_ETCD_PASSWORD_FD.
        """
        options, job = EtcdOptions.from_url(url)
        return cls(options, job, timeout, last_clears)

    @property
    def url(self) -> str:
        """What `from_url` reads; the password is not in it."""
        return self._options.url(self._job)

    @property
    def _named(self) -> str:
        return str(self._gateway)

    def _answered(self, request: StoreRequest, patience_s: float) -> Reply | None:
        keys = request.keys
        match request.op:
            case "get" | "wait":
                return self._await(request)
            case "add" | "append" | "compare_set":
                return self._change(request)
            case "set":
                for key, value in zip(keys, request.values, strict=True):
                    self._commit([], [self._put(key, value)])
                return Reply("ok")
            case "check":
                return Reply("ok", int(len(self._read(keys)[1]) == len(set(keys))))
            case "delete":
                return Reply("ok", sum(map(self._delete, keys)))
            case "count":
                answer = self._ask_etcd("kv/range", range_below(self._keys) | {"count_only": True})
                return Reply("ok", int(answer.get("count", 0)))
            case "list":
                answer = self._ask_etcd("kv/range", range_below(self._keys) | {"keys_only": True})
                return Reply("ok", names=tuple(sorted(keys_below(self._keys, answer))))
            case "control":
                raise StoreError("etcd has no coordinator", op=request.op)

    def _delete(self, key: str) -> bool:
        while found := self._read([key])[1]:
            unchanged = has_revision(self._keys + key, found[key].revision)
            if self._commit([unchanged], [delete(self._keys + key)]):
                return True
        return False

    def clear(self) -> None:
        """Delete everything of this job, when it has ended."""
        self._ask_etcd("kv/deleterange", range_below(self._root))

    def close(self) -> None:
        """Close the connections."""
        if self._closed or self._pid != os.getpid():
            return
        if self._last_clears:
            with contextlib.suppress(StoreError):
                if self.add(_USERS, -1) == 0:
                    self.clear()
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for writer in idle:
            writer.close()

    def _start_afresh(self) -> None:
        """Begin without connections: at first, and in a forked child, whose parent's they are."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._idle: list[_TransactionWriter] = []

    @contextlib.contextmanager
    def _writer(self) -> Generator[_TransactionWriter]:
        """Yield a writer for this thread alone; one that failed is thrown away."""
        if self._pid != os.getpid():
            self._start_afresh()
        with self._lock:
            if self._closed:
                raise StoreError(f"the store in {self._gateway} was closed by this process")
            writer = self._idle.pop() if self._idle else None
        if writer is None:
            writer = _TransactionWriter(
                self._gateway, f"{self._root}writers/{secrets.token_hex(8)}"
            )
        timeout_s = self._timeout.total_seconds()
        writer.patience_s = min(timeout_s, _LOST_S) if self._met else timeout_s
        began = time.monotonic()
        try:
            yield writer
        except Unanswered as error:
            writer.close()
            raise self._gone(str(error), time.monotonic() - began) from None
        except BaseException:
            writer.close()
            raise
        with self._lock:
            self._idle.append(writer)

    def _gone(self, why: str, elapsed_s: float) -> StoreError:
        if self._met:
            return StoreLost(f"{self._gateway} is lost", elapsed_s=elapsed_s, seen=why)
        return StoreTimeout(
            f"{self._gateway} cannot be reached",
            elapsed_s=elapsed_s,
            seen=why,
            fix="Check the addresses, and that a majority of its members runs.",
        )

    def _ask_etcd(self, path: str, body: Json, answer_s: float = ANSWER_S) -> Json:
        """Ask what may be asked twice."""
        with self._writer() as writer:
            return writer.ask(path, body, answer_s)

    def _commit(self, compares: list[Json], steps: list[Json]) -> bool:
        with self._writer() as writer:
            return writer.commit(compares, steps)

    def _put(self, key: str, value: bytes) -> Json:
        """Return the step that writes a value.

        Raises:
            UsageError: It is longer than etcd takes.
        """
        if len(value) > MAX_ETCD_BYTES:
            raise UsageError(
                "a value is too long for etcd",
                seen=f"{len(value)} bytes, and {MAX_ETCD_BYTES} are allowed",
                fix="Send tensors and large objects with a collective instead.",
            )
        return put(self._keys + key, value)

    def _read(self, keys: Sequence[str]) -> tuple[int, dict[str, KeyValue]]:
        """Return the revision of all keys, and those of `keys` that exist."""
        names = list(dict.fromkeys(keys))
        revision, found = 0, dict[str, KeyValue]()
        for start in range(0, max(1, len(names)), _MOST_READS):
            some = names[start : start + _MOST_READS]
            steps = [{"request_range": {"key": encode(self._keys + key)}} for key in some]
            answer = self._ask_etcd("kv/txn", {"success": steps})
            revision = revision or int(answer["header"]["revision"])
            for part in answer.get("responses", ()):
                found |= keys_below(self._keys, part["response_range"])
        return revision, found

    def _change(self, request: StoreRequest) -> Reply:
        """Put in place what a board makes of a key's value."""
        key, crowd_s = request.keys[0], _CROWD_S
        while True:
            found = self._read([key])[1].get(key)
            board = Board()
            if found is not None:
                board.data[key] = found.value
            reply = board.handle(b"", request, 0.0)[0][1]
            if key not in board.data:
                return reply
            if found is not None and board.data[key] == found.value:
                return reply
            unchanged = has_revision(self._keys + key, found.revision if found else 0)
            if self._commit([unchanged], [self._put(key, board.data[key])]):
                return reply
            time.sleep(random.uniform(0, crowd_s))  # others want the same key
            crowd_s = min(2 * crowd_s, _MOST_CROWD_S)

    def _await(self, request: StoreRequest) -> Reply:
        """Return the values of keys when all exist; after the timeout, the missing ones' names."""
        keys, deadline = request.keys, time.monotonic() + request.timeout_s
        while True:
            revision, found = self._read(keys)
            missing = tuple(key for key in keys if key not in found)
            if not missing:
                return Reply("ok", values=tuple(found[key].value for key in keys))
            if time.monotonic() >= deadline:
                return Reply("timeout", names=missing)
            self._await_change({"key": encode(self._keys + missing[0])}, revision + 1, deadline)

    def _await_change(self, where: Json, since: int, deadline: float) -> None:
        """Wait for a change since a revision, or the deadline.

        May return early; the caller reads the state again, which raises if etcd is lost.
        """
        watch = EtcdWatch(self._gateway, where, since)
        watch.await_change(since, deadline - time.monotonic())
        if watch.has_ended:
            time.sleep(_PAUSE_S)  # a cluster without a leader refuses watches at once
        watch.close()


class _TransactionWriter:
    """A connection, and the key that holds the outcome of this writer's last transaction.

    Attributes:
        patience_s: How long an answer is looked for.

    Threads:
        One at a time.
    """

    def __init__(self, gateway: Gateway, name: str) -> None:
        self.patience_s = _LOST_S
        self._connection = gateway.connection()
        self._name, self._last = name, b""

    def ask(self, path: str, body: Json, answer_s: float = ANSWER_S) -> Json:
        """Ask, at one member after the other, until there is an answer.

        Raises:
            Unanswered: There was none in time.
        """
        deadline = time.monotonic() + self.patience_s
        while True:
            try:
                return self._connection.ask(path, body, answer_s)
            except Unanswered:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(random.uniform(0, _PAUSE_S))

    def commit(self, compares: list[Json], steps: list[Json]) -> bool:
        """Carry out a transaction, once; return whether its conditions held, so that it was done.

        Raises:
            Unanswered: It may have been done or not.
        """
        nonce = secrets.token_bytes(8)
        done, not_done = nonce + b"1", nonce + b"0"
        change = {
            "compare": compares,
            "success": [*steps, put(self._name, done)],
            "failure": [put(self._name, not_done)],
        }
        while self._last not in (done, not_done):
            name, value = self._name, self._last
            last = has_value(name, value) if value else has_revision(name, 0)
            body = {
                "compare": [last],
                "success": [{"request_txn": change}],
                "failure": [{"request_range": {"key": encode(self._name)}}],
            }
            answer = self.ask("kv/txn", body)
            outcome = answer["responses"][0]
            if answer.get("succeeded"):
                self._last = done if outcome["response_txn"].get("succeeded") else not_done
            else:  # it was done already; or all keys of the job were deleted, this one with them
                kept = outcome["response_range"].get("kvs", ())
                self._last = decode(kept[0]["value"]) if kept else b""
        return self._last == done

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

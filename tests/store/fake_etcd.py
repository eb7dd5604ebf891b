"""The part of etcd's JSON gateway that Dure uses, in a thread of the test: no etcd is needed.

It counts requests and connections. Leases are granted, and never end.
"""

from __future__ import annotations

import base64
import contextlib
import json
import select
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Json = dict[str, Any]

_LOOK_S = 0.05
"""How often a watch looks whether its client has gone."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: FakeEtcd

    def setup(self) -> None:
        super().setup()
        self.server.num_connections += 1

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        path = self.path.removeprefix("/v3/")
        self.server.requests[path] += 1
        if path == "watch":
            self._stream(body["create_request"])
            return
        with self.server.changed:
            answer = json.dumps(self.server.carry_out(path, body)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def _stream(self, create: Json) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        start, sent = int(create["start_revision"]), 0
        self._send({"result": {"created": True}})
        with contextlib.suppress(OSError):
            while not self.server.ending:
                if select.select([self.connection], [], [], 0)[0]:
                    return  # the client has closed it
                with self.server.changed:
                    if len(self.server.events) == sent:
                        self.server.changed.wait(_LOOK_S)
                    new, sent = self.server.events[sent:], len(self.server.events)
                found = [
                    {"kv": event}
                    for event in new
                    if int(event["mod_revision"]) >= start and is_in(event["key"], create)
                ]
                if found:
                    self._send({"result": {"events": found}})

    def _send(self, message: Json) -> None:
        line = json.dumps(message).encode() + b"\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet."""


class FakeEtcd(ThreadingHTTPServer):
    """One member.

    Attributes:
        requests: How many there were, by path.
        num_connections: How many clients have opened.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: Counter[str] = Counter()
        self.num_connections = 0
        self.changed = threading.Condition(threading.RLock())
        self.events: list[Json] = []
        self.ending = False
        self._kvs: dict[str, Json] = {}
        self._revision = 1

    @property
    def names(self) -> str:
        """Its endpoint."""
        return f"127.0.0.1:{self.server_address[1]}"

    def carry_out(self, path: str, body: Json) -> Json:
        """Answer a request."""
        before = self._revision
        match path:
            case "kv/range":
                answer = self._range(body)
            case "kv/txn":
                answer = self._txn(body)
            case "kv/deleterange":
                answer = self._delete(body)
            case "lease/grant":
                answer = {"ID": "7"}
            case "lease/keepalive":
                answer = {"result": {"TTL": "20"}}
            case _:
                answer = dict[str, object]()
        if len(self.events) and int(self.events[-1]["mod_revision"]) > before:
            self._revision += 1
            self.changed.notify_all()
        return {"header": {"revision": str(self._revision)}} | answer

    def _range(self, body: Json) -> Json:
        found = [kv for kv in self._kvs.values() if is_in(kv["key"], body)]
        return {"count": str(len(found)), "kvs": [] if body.get("count_only") else found}

    def _delete(self, body: Json) -> Json:
        for key in [key for key in self._kvs if is_in(key, body)]:
            del self._kvs[key]
            self.events.append({"key": key, "mod_revision": str(self._revision + 1)})
        return {}

    def _txn(self, body: Json) -> Json:
        succeeded = all(self._holds(compare) for compare in body.get("compare", ()))
        answers = [self._step(step) for step in body.get("success" if succeeded else "failure", ())]
        return {"succeeded": succeeded, "responses": answers}

    def _holds(self, compare: Json) -> bool:
        kv = self._kvs.get(compare["key"])
        if compare["target"] == "VALUE":
            return kv is not None and kv["value"] == compare["value"]
        return (kv["mod_revision"] if kv else "0") == compare["mod_revision"]

    def _step(self, step: Json) -> Json:
        ((kind, body),) = step.items()
        if kind == "request_put":
            kv = body | {"mod_revision": str(self._revision + 1)}
            self._kvs[body["key"]] = kv
            self.events.append(kv)
            return {"response_put": {}}
        name = kind.removeprefix("request_")
        act = {"range": self._range, "delete_range": self._delete, "txn": self._txn}[name]
        return {f"response_{name}": act(body)}


def is_in(key: str, where: Json) -> bool:
    """Tell whether a key is the one, or in the range, that a request names."""
    name, first = base64.b64decode(key), base64.b64decode(where["key"])
    end = base64.b64decode(where.get("range_end", ""))
    return first <= name < end if end else name == first


@contextlib.contextmanager
def fake_etcd() -> Iterator[FakeEtcd]:
    """Run a member."""
    with FakeEtcd() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            with server.changed:
                server.ending = True
                server.changed.notify_all()
            server.shutdown()
            thread.join()

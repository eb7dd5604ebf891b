"""A port of the launcher that answers each HTTP GET with one text: probes, and metrics."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

__all__ = ["Answer", "HttpPort"]

_SILENT_S = 10.0
"""How long a client may send nothing."""


class Answer(NamedTuple):
    """What a request is answered with."""

    code: int
    kind: str
    """The content's type."""
    text: str


class _Server(ThreadingHTTPServer):
    daemon_threads = True


class HttpPort:
    """Answers HTTP requests on threads until `close`.

    Args:
        port: The TCP port, on every address of this host; 0: a free one.
        name: Of the thread.
        answer: Called on such a thread with the path of a request.

    Raises:
        OSError: The port is taken.
    """

    def __init__(self, port: int, name: str, answer: Callable[[str], Answer]) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = _SILENT_S

            def do_GET(self) -> None:
                code, kind, text = answer(self.path)
                body = text.encode()
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Do not print each request."""

        self._server = _Server(("", port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port, if any was asked for."""
        return self._server.server_port

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

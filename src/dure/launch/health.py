"""An HTTP port for probes of Kubernetes: does the launcher live, and does it do its work?

Each GET is answered with 200 and a line of JSON, such as `{"running": true, "quiet_s": 1.5}`:
whether a round runs, and for how long its ranks have shown no sign of work (only known with
`--hang-timeout`). A launcher that is stuck itself and did not end a hang answers 503.
"""

from __future__ import annotations

import json
import time

from dure.launch.hang import HangDetector
from dure.launch.http_port import Answer, HttpPort

__all__ = ["HealthServer"]

_OVERDUE = 3
"""A hang is found after at most twice the time-out, so after three times the launcher is stuck."""


class HealthServer:
    """Answers HTTP requests on a thread until `close`.

    Args:
        port: The TCP port, on every address of this host; 0: a free one.

    Attributes:
        running: Whether a round runs.
        hang: The check of the round for a hang, if there is one.

    Raises:
        OSError: The port is taken.
    """

    def __init__(self, port: int) -> None:
        self.running = False
        self.hang: HangDetector | None = None
        self._http = HttpPort(port, "dure-health", self._answer)

    @property
    def port(self) -> int:
        """The port, if any was asked for."""
        return self._http.port

    def _answer(self, path: str) -> Answer:
        code, state = self.state()
        return Answer(code, "application/json", json.dumps(state) + "\n")

    def state(self) -> tuple[int, dict[str, object]]:
        """Return the HTTP status, and what is known of the job."""
        hang, code = self.hang, 200
        state: dict[str, object] = {"running": self.running}
        if self.running and hang is not None:
            quiet_s = hang.quiet_s(time.monotonic())
            state["quiet_s"] = round(quiet_s, 1)
            code = 503 if quiet_s > _OVERDUE * hang.after_s else 200
        return code, state

    def close(self) -> None:
        """Stop answering."""
        self._http.close()

"""The port for probes of Kubernetes."""

import contextlib
import json
import time
import urllib.error
import urllib.request
from typing import Any

from dure.launch.hang import HangDetector
from dure.launch.health import HealthServer


def ask(server: HealthServer) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/healthz") as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_a_probe_fails_only_if_a_hang_was_not_ended() -> None:
    with contextlib.closing(HealthServer(0)) as server:
        assert ask(server) == (200, {"running": False})
        server.running = True
        assert ask(server) == (200, {"running": True})
        server.hang = HangDetector(600.0, time.monotonic())
        code, state = ask(server)
        assert code == 200
        assert 0 <= state["quiet_s"] < 600
        server.hang = HangDetector(600.0, time.monotonic() - 3 * 600 - 1)
        assert ask(server)[0] == 503
        server.running = False
        assert ask(server)[0] == 200

"""Agents: one `dure run` on each host, which together start, stop and restart a job's rounds."""

from __future__ import annotations

from dure.launch.agent.events import Event
from dure.launch.agent.machine import Machine, Settings

__all__ = ["Event", "Machine", "Settings"]

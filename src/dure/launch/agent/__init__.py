"""Agents: one `dure run` on each host, which together start, stop and restart a job's rounds."""

from __future__ import annotations

from dure.launch.agent.events import Event, Settings
from dure.launch.agent.machine import Machine

__all__ = ["Event", "Machine", "Settings"]

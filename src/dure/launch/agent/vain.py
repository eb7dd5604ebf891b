"""What people are told when a job has waited for hosts in vain."""

from __future__ import annotations

from collections.abc import Sequence

from dure.launch.agent.events import Joined
from dure.launch.agent.parts import Parts
from dure.launch.agent.settings import Settings

__all__ = ["cut_off", "too_few"]


def too_few(settings: Settings, came: Sequence[Joined], chosen: Sequence[str]) -> str:
    """Say that too few hosts came.

    Args:
        settings: What the user decided.
        came: The agents at hand.
        chosen: Those of them that would take part, in their order.
    """
    host_of = {joined.agent: joined.host for joined in came}
    hosts = [host_of[agent] for agent in chosen]
    why = (
        f"too few hosts came to {settings.endpoint or 'the endpoint'} within "
        f"{settings.join_timeout_s:g} s: {len(hosts)} of {settings.min_hosts} "
        f"({', '.join(hosts) or 'none'})"
    )
    if len(hosts) < len(came):
        return f"{why}; others were excluded, or had a node rank that was taken"
    return (
        f"{why}; start the same command on the other hosts, and see there that this port can be "
        "reached and that --nnodes is the same"
    )


def cut_off(settings: Settings, parts: Parts) -> str:
    """Say that this part of the job was not the one to go on, and the other did not come back."""
    return (
        f"cut off from {parts}, who may be the part of the job that goes on; they did not come "
        f"back within {settings.join_timeout_s:g} s"
    )

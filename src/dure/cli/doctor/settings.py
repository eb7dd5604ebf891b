"""The environment of this shell: variables left over from other jobs, or that work against one."""

from __future__ import annotations

from dataclasses import dataclass

from dure import env
from dure.cli.doctor.finding import Finding, fine, warning

__all__ = ["Settings", "judge", "read"]

_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Variables that are set, by name; `usable` is how many hardware threads there are."""

    variables: dict[str, str]
    usable: int


def read(usable: int) -> Settings:
    """Read those that matter."""
    names = (*_RANK_VARIABLES, "DURE_LAUNCHER", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    found = {name: env.text(name) for name in names}
    return Settings(variables={k: v for k, v in found.items() if v is not None}, usable=usable)


def judge(settings: Settings) -> list[Finding]:
    """Say what would surprise a job that is started from here."""
    found: list[Finding] = []
    given = [name for name in _RANK_VARIABLES if name in settings.variables]
    if given and "DURE_LAUNCHER" not in settings.variables and len(given) < len(_RANK_VARIABLES):
        found.append(
            warning(
                "environment",
                f"{', '.join(given)} set, but not the rest of a rank's variables",
                f"unset {' '.join(given)}, unless a scheduler has set them (`dure env` says who).",
            )
        )
    threads = settings.variables.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > settings.usable:
        found.append(
            warning(
                "environment",
                f"OMP_NUM_THREADS={threads}, with {settings.usable} usable hardware threads",
                "unset OMP_NUM_THREADS; `dure run` chooses it from cores and ranks.",
            )
        )
    return found or [fine("environment", "nothing in the way")]

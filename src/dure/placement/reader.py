"""Reading variables, and keeping a note of what could not be understood."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from dure.placement.nodes import expand_counts, expand_hosts

__all__ = ["Reader", "set_here"]

T = TypeVar("T")

_LARGEST = 0xFFFF_FFFF  # the numbers of Slurm's steps go up to this

_NAMES = """
RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE LOCAL_SIZE GROUP_RANK NODE_RANK CROSS_RANK
MASTER_ADDR MASTER_PORT DURE_LAUNCHER TORCHELASTIC_RUN_ID
PET_NNODES PET_NODE_RANK PET_NPROC_PER_NODE PET_MASTER_ADDR PET_MASTER_PORT
SLURM_JOB_ID SLURM_STEP_ID SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_NTASKS SLURM_NODEID SLURM_LOCALID
SLURM_STEP_NODELIST SLURM_JOB_NODELIST SLURM_STEP_NUM_NODES SLURM_NNODES SLURM_STEP_TASKS_PER_NODE
SLURM_TASKS_PER_NODE SLURM_LAUNCH_NODE_IPADDR SLURM_PTY_PORT SLURM_GPUS_ON_NODE SLURM_RESTART_COUNT
OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE
OMPI_MCA_ess_base_jobid PMIX_NAMESPACE PMIX_RANK PMI_RANK PMI_SIZE PMI_JOBID MPI_LOCALRANKID
MPI_LOCALNRANKS I_MPI_HYDRA_UUID
JOB_COMPLETION_INDEX NNODES JOBSET_NAME JOBSET_SUBDOMAIN HOSTNAME KUBERNETES_SERVICE_HOST
"""
"""Every variable that detection reads; docs/clusters.md has their meanings."""


def set_here(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that detection reads and `environ` has."""
    return {name: environ[name] for name in _NAMES.split() if environ.get(name)}


class Reader:
    """The variables of one environment; a malformed one counts as absent, and makes a note."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.notes: list[str] = []

    def has(self, *names: str) -> bool:
        """Whether all of `names` are set."""
        return all(self.text(name) for name in names)

    def text(self, *names: str) -> str | None:
        """Return the first of `names` that is set."""
        for name in names:
            value = self._environ.get(name, "").strip()
            if value:
                return value
        return None

    def number(self, *names: str) -> int | None:
        """Return the first of `names` that is an integer from 0 up."""
        return self._parsed(_natural, "an integer from 0 up", *names)

    def count(self, *names: str) -> int | None:
        """Return the first of `names` that is a count as torchrun writes it.

        It may also be a range, whose upper end counts, or auto, cpu or gpu, which like 0 give no
        number.
        """
        found = (self._parsed(_count, "a number or a range", name) for name in names)
        return next(filter(None, found), None)

    def counts(self, *names: str) -> tuple[int, ...]:
        """Return the first of `names` that is a list of counts, as Slurm writes it."""
        return self._parsed(expand_counts, "a list of counts", *names) or ()

    def hosts(self, *names: str) -> tuple[str, ...]:
        """Return the first of `names` that is a list of hosts, as Slurm writes it."""
        return self._parsed(expand_hosts, "a list of hosts", *names) or ()

    def note(self, text: str) -> None:
        """Record what does not fit together."""
        if text not in self.notes:
            self.notes.append(text)

    def _parsed(self, parse: Callable[[str], T], form: str, *names: str) -> T | None:
        for name in names:
            text = self.text(name)
            if text is None:
                continue
            try:
                return parse(text)
            except ValueError:
                self.note(f"{name} is not {form}, and is ignored: {text[:80]!r}")
        return None


def _count(text: str) -> int:
    if text.isalpha():
        return 0
    least, colon, most = text.partition(":")
    return max(_natural(least), _natural(most)) if colon else _natural(least)


def _natural(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) > _LARGEST:
        raise ValueError(text)
    return int(text)

"""Runs the cases of one subject on one rank."""

from __future__ import annotations

from types import ModuleType

import dure as dist

from . import failing, layouts, memory, messages, misuse, moving, overlapping, reducing

SUBJECTS = {
    m.__name__.rpartition(".")[2]: m
    for m in (moving, reducing, layouts, overlapping, messages, misuse, memory, failing)
}


def cases_of(module: ModuleType, n: int) -> list[str]:
    """Return the names of a module's cases for `n` ranks, in the order of the source."""
    if n == 1 and getattr(module, "NEEDS_PEERS", False):
        return []
    return [name for name in vars(module) if name.startswith("case_")]


def check(ran: list[list[str]], subject: str, skip: tuple[str, ...] = ()) -> None:
    """Require that all ranks ran all cases of a subject but those to skip."""
    wanted = [name for name in cases_of(SUBJECTS[subject], len(ran)) if name not in skip]
    assert ran == [wanted] * len(ran)


def run(rank: int, subject: str, skip: tuple[str, ...] = ()) -> list[str]:
    """Run the cases of `conformance.<subject>`; return the names of those that ran.

    The first case that fails ends the run: the ranks may have lost each other.
    """
    module = SUBJECTS[subject]
    n, ran = dist.get_world_size(), []
    for name in cases_of(module, n):
        if name in skip:
            continue
        try:
            getattr(module, name)(rank, n)
        except BaseException as e:
            e.add_note(f"in {subject}.{name}, backend {dist.get_backend()}, rank {rank} of {n}")
            raise
        ran.append(name)
    dist.barrier()
    return ran

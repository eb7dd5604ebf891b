"""RANK and WORLD_SIZE: what launchers of torch's kind set, and what users set by hand."""

from __future__ import annotations

from dure.placement.reader import Reader
from dure.placement.value import Member, Placement, System

__all__ = ["NUMBERED", "read_environment"]


def read_environment(reader: Reader) -> Placement | None:
    """Return the placement of a process that was told its RANK and WORLD_SIZE."""
    rank, size = reader.number("RANK"), reader.number("WORLD_SIZE")
    if rank is None or size is None:
        if size is not None and reader.has("LOCAL_RANK") and not reader.has("RANK"):
            reader.note(
                "WORLD_SIZE and LOCAL_RANK are set without RANK, as Lightning does for processes "
                "that it starts itself: start the program with `dure run`, and it starts none"
            )
        return None
    if rank >= size:
        reader.note(f"RANK={rank} is none of the ranks that WORLD_SIZE={size} says there are")
        return None
    system = _starter(reader)
    reader.keep("rank", rank, "RANK", NUMBERED[system])
    reader.keep("ranks", size, "WORLD_SIZE")
    local = reader.take("local rank", "", "LOCAL_RANK")
    here = reader.take("ranks here", "", "LOCAL_WORLD_SIZE", "LOCAL_SIZE")
    node = reader.take("node", "", "GROUP_RANK", "NODE_RANK", "CROSS_RANK")
    unclear = system is System.PLAIN and size > 1
    if unclear:
        reader.note(
            "RANK and WORLD_SIZE are set without LOCAL_RANK: a program takes them to count "
            "processes; if they count hosts, as PAI-DLC and old PyTorchJobs mean them, start "
            '`dure run --nnodes "$WORLD_SIZE" --node-rank "$RANK" --nproc N ...`'
        )
    return Placement(
        system=system,
        member=Member(
            rank=rank, world_size=size, local_rank=local, local_world_size=here, node=node
        ),
        job=reader.text("TORCHELASTIC_RUN_ID"),
        unclear=unclear,
    )


NUMBERED = {
    System.DURE: "set by the `dure run` that started this process",
    System.TORCHRUN: "set together with LOCAL_RANK and TORCHELASTIC_RUN_ID",
    System.LAUNCHER: "set together with LOCAL_RANK, as torchrun does",
    System.PLAIN: "set by hand, or by a launcher that does not name itself",
}


def _starter(reader: Reader) -> System:
    if reader.has("DURE_LAUNCHER"):
        return System.DURE
    if not reader.has("LOCAL_RANK"):
        return System.PLAIN
    return System.TORCHRUN if reader.has("TORCHELASTIC_RUN_ID") else System.LAUNCHER

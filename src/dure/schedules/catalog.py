"""The schedules by name, and what each of them asks of stages, ranks and microbatches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dure.errors import UsageError
from dure.schedules.actions import Schedule, loop_placement, v_placement
from dure.schedules.fill_drain import forward_only, gpipe, looped_bfs
from dure.schedules.one_f_one_b import interleaved_1f1b, interleaved_zero_bubble, one_f_one_b
from dure.schedules.v_shaped import dualpipe_v, zb_v

__all__ = ["SCHEDULES", "Generator", "find_generator", "make_schedule"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generator:
    """A schedule that can be made, and what it asks for.

    Args:
        name: Its name.
        torch_name: torch's name for it, as `get_schedule_class` takes it.
        make: Makes it from where the stages lie and the number of microbatches.
        stages_a_rank: How many stages each rank has; None: any number.
        v_shaped: Stages go over the ranks there and back, not round and round.
        microbatches_a_stage: The least number of microbatches for each stage.
        trains: It has backwards.

    Obtained from:
        `find_generator` and `SCHEDULES`.
    """

    name: str
    torch_name: str
    make: Callable[[tuple[int, ...], int], Schedule]
    stages_a_rank: int | None = None
    v_shaped: bool = False
    microbatches_a_stage: int = 0
    trains: bool = True

    def placement(self, stages: int, ranks: int) -> tuple[int, ...]:
        """Return the rank of each stage.

        Raises:
            UsageError: The stages do not fit the ranks.
        """
        if self.stages_a_rank is not None and stages != ranks * self.stages_a_rank:
            each = "one stage" if self.stages_a_rank == 1 else f"{self.stages_a_rank} stages"
            other = "" if stages % ranks else ", or take interleaved-1f1b"
            raise UsageError(
                f"{self.name} has {each} on each rank",
                seen=f"{stages} stages on {ranks} ranks",
                fix=f"Cut the model into {ranks * self.stages_a_rank} stages{other}.",
            )
        return (v_placement if self.v_shaped else loop_placement)(stages, ranks)


SCHEDULES = (
    Generator(name="gpipe", torch_name="GPipe", make=gpipe, stages_a_rank=1),
    Generator(name="1f1b", torch_name="1F1B", make=one_f_one_b, stages_a_rank=1),
    Generator(name="interleaved-1f1b", torch_name="Interleaved1F1B", make=interleaved_1f1b),
    Generator(name="looped-bfs", torch_name="LoopedBFS", make=looped_bfs),
    Generator(
        name="interleaved-zero-bubble",
        torch_name="InterleavedZeroBubble",
        make=interleaved_zero_bubble,
    ),
    Generator(name="zb-v", torch_name="ZBVZeroBubble", make=zb_v, stages_a_rank=2, v_shaped=True),
    Generator(
        name="dualpipe-v",
        torch_name="DualPipeV",
        make=dualpipe_v,
        stages_a_rank=2,
        v_shaped=True,
        microbatches_a_stage=1,
    ),
    Generator(name="forward-only", torch_name="ForwardOnly", make=forward_only, trains=False),
)
"""Every schedule that can be made by name."""


def find_generator(name: str) -> Generator:
    """Return the schedule of that name, ours or torch's, in any case.

    Args:
        name: The name, such as "zb-v" or torch's "ZBVZeroBubble".

    Returns:
        The generator of that schedule.

    Raises:
        UsageError: There is none; lists those that are.

    Example:
        ```python
        from dure import schedules

        assert schedules.find_generator("GPipe") is schedules.find_generator("gpipe")
        ```
    """
    wanted = _plain(name)
    for generator in SCHEDULES:
        if wanted in (_plain(generator.name), _plain(generator.torch_name)):
            return generator
    raise UsageError(
        "there is no such schedule",
        seen=repr(name),
        fix=f"Take one of {', '.join(generator.name for generator in SCHEDULES)}.",
    )


def _plain(name: str) -> str:
    return "".join(filter(str.isalnum, name)).lower()


def make_schedule(name: str, *, stages: int, microbatches: int, ranks: int) -> Schedule:
    """Return the lists of computation of a schedule, without transfers (`lower` adds them).

    Args:
        name: One of `SCHEDULES`, or torch's name for it.
        stages: Stages of the model, over all ranks.
        microbatches: Microbatches of a step.
        ranks: Ranks of the pipeline.

    Raises:
        UsageError: There is no such schedule, or it does not fit; says what would.

    Example:
        ```python
        from dure.schedules import make_schedule

        schedule = make_schedule("1f1b", stages=2, microbatches=4, ranks=2)
        assert str(schedule.ranks[1][0]) == "1F0"            # stage 1, forward of microbatch 0
        ```
    """
    if ranks < 1:
        raise UsageError("a pipeline has at least one rank", seen=str(ranks), fix="Take 1.")
    generator = find_generator(name)
    placement = generator.placement(stages, ranks)
    least = max(1, generator.microbatches_a_stage * stages)
    if microbatches < least:
        raise UsageError(
            f"{generator.name} takes at least {least} microbatches for {stages} stages",
            seen=str(microbatches),
            fix=f"Take {least} microbatches, or another schedule.",
        )
    return generator.make(placement, microbatches)

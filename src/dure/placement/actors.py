"""Variables for processes that no launcher numbered, such as the actors of Ray.

The driver knows on which node each actor runs and which GPUs it was given. Ranks are numbered node
by node, in the order in which nodes appear, so that the ranks of a node follow each other. Actors
of a node all see the GPUs of all of them, in one order, and LOCAL_RANK says which is an actor's
own: programs and NCCL expect that, where Ray would show each actor its own GPU alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from dure.errors import UsageError

__all__ = ["actor_variables"]


def actor_variables(
    actors: Sequence[tuple[str, Sequence[int | str]]], port: int
) -> list[dict[str, str]]:
    """Return the environment variables of each actor, in the order of `actors`.

    Args:
        actors: Of each actor, the address of its node and the GPUs that are its own (none: `()`).
        port: Where rank 0's host listens for the others; free there.

    Returns:
        RANK, WORLD_SIZE and the like, MASTER_ADDR and MASTER_PORT, and, where there are GPUs,
        CUDA_VISIBLE_DEVICES. An actor sets them before it touches a GPU, then calls
        `dure.init_process_group()`.

    Raises:
        UsageError: There are no actors, or two of a node were given the same GPU.

    Example:
        ```python
        from dure.placement import actor_variables

        actors = [("10.0.0.1", [0]), ("10.0.0.2", [0]), ("10.0.0.1", [1])]
        ranks = [variables["RANK"] for variables in actor_variables(actors, 29500)]
        assert ranks == ["0", "2", "1"]  # ranks of one node follow each other
        ```
    """
    if not actors:
        raise UsageError("there are no actors")
    nodes: dict[str, list[int]] = {}
    for number, (node, _) in enumerate(actors):
        nodes.setdefault(node, []).append(number)
    out: dict[int, dict[str, str]] = {}
    for group_rank, (node, numbers) in enumerate(nodes.items()):
        numbers.sort(key=lambda number: [str(gpu).zfill(8) for gpu in actors[number][1]])
        gpus = [str(gpu) for number in numbers for gpu in actors[number][1]]
        if len(set(gpus)) < len(gpus):
            raise UsageError(
                "two actors of a node have the same GPU",
                seen=f"node {node}: GPUs {', '.join(gpus)}",
                fix="Give each actor GPUs of its own (num_gpus=1), or none.",
            )
        for local_rank, number in enumerate(numbers):
            variables: dict[str, object] = {
                "RANK": len(out),
                "WORLD_SIZE": len(actors),
                "LOCAL_RANK": local_rank,
                "LOCAL_WORLD_SIZE": len(numbers),
                "GROUP_RANK": group_rank,
                "GROUP_WORLD_SIZE": len(nodes),
                "MASTER_ADDR": next(iter(nodes)),
                "MASTER_PORT": port,
            }
            if actors[number][1]:
                variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
            out[number] = {name: str(value) for name, value in variables.items()}
    return [out[number] for number in range(len(actors))]

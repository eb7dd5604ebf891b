"""`follow`: forwards that some ranks make more often than others, such as those of a `generate`.

Inside the block each forward of the outermost module begins with a flag of each rank: which module
it calls. A rank that has come to the end of the block has nothing to call; as long as others have,
it takes part in their gathers, and computes nothing.

    rank 0   forward   forward   forward   end
    rank 1   forward   end: . . follows, follows, ends with rank 0
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from dure.comm.world import resolve
from dure.errors import CommError, Desync, UsageError
from dure.parallel.fsdp.explain import names_of
from dure.parallel.fsdp.state import FSDPState, state_of, states_in
from dure.parallel.fsdp.tree import Tree

__all__ = ["follow"]

_DONE, _FAILED, _UNABLE = 0, -1, -2
_NAMES = {_DONE: "no forward", _FAILED: "raised", _UNABLE: "no forward, and none before"}


@contextmanager
def follow(model: nn.Module) -> Iterator[None]:
    """Let ranks make different numbers of forwards in a block, without gradients.

        with fsdp.follow(model), torch.no_grad():
            while not done(tokens):
                tokens = append(tokens, model(tokens))

    A rank that leaves the loop waits at the end of the block for the others, and follows them.

    Args:
        model: Has sharded modules within, or is one. The loop calls its forward, not a method of
            it that was registered (`register_fsdp_forward_method`) and loops inside.

    Raises:
        ModuleError: Nothing of the model is sharded.
        UsageError: A forward with gradients; a block within a block; or, on all ranks, a rank that
            has never made a forward of the model is to follow one, whose order it does not know.
        Desync: Ranks call different modules, or one has raised.

    Collective:
        All ranks of the mesh; of the world, where modules have several meshes.

    Cost:
        An all_gather of 8 bytes a forward.
    """
    states = states_in(model, "follow")
    if any(state.announce is not None for state in states):
        raise UsageError("the block is within another for the same model", op="follow")
    following = _Following(model, states)
    for state in states:
        state.announce = following.called
    try:
        yield
        following.finish()
    except BaseException as error:
        if not (following.was_reported or isinstance(error, CommError)):
            following.exchange(_FAILED)
        raise
    finally:
        for state in states:
            state.announce = None


class _Following:
    """What a rank exchanges with the others in a block of `follow`.

    Attributes:
        was_reported: All ranks know of the error that is raised.
    """

    def __init__(self, model: nn.Module, states: Sequence[FSDPState]) -> None:
        self._states = states
        self._modules = [module for state in states for module in state.modules]
        names = names_of(model)
        self._names = [names.get(module, "(outside)") for module in self._modules]
        groups = {p.axes.shard_group for s in states for g in s.groups for p in g.parameters}
        self._group = groups.pop() if len(groups) == 1 else resolve(None, "follow")
        self._device = "cuda" if self._group.backend_name == "nccl" else "cpu"
        self.was_reported = False

    def called(self, module: nn.Module) -> None:
        """Tell the others that this rank begins a forward."""
        if torch.is_grad_enabled():
            raise UsageError(
                "ranks follow forwards without gradients only",
                op="follow",
                seen=f"a forward of {self._names[self._modules.index(module)]}",
                fix="Use torch.no_grad() as well.",
            )
        self._exchange(1 + self._modules.index(module))

    def finish(self) -> None:
        """Follow the other ranks until none of them calls a module."""
        gathers = any(g.strategy.name != "shared" for s in self._states for g in s.groups)
        trees = {state.tree for state in self._states}
        knows = not gathers or any(tree is not None and tree.orders()[0] for tree in trees)
        while number := self._exchange(_DONE if knows else _UNABLE):
            entry = self._modules[number - 1]
            state = state_of(entry)
            assert state is not None
            (state.tree or Tree(state)).join_forward(entry)

    def _exchange(self, number: int) -> int:
        """Send what this rank calls; return what other ranks call, 0 if none calls anything."""
        numbers = self.exchange(number)
        called = {n for n in numbers if n > 0}
        if len(called) <= 1 and _FAILED not in numbers and not (called and _UNABLE in numbers):
            return called.pop() if called else _DONE
        self.was_reported = True
        calls = {
            rank: f"forward of {self._names[n - 1]}" if n > 0 else _NAMES[n]
            for rank, n in enumerate(numbers)
        }
        seen = "; ".join(f"rank {rank}: {call}" for rank, call in calls.items())
        if _FAILED in numbers or len(called) > 1:
            raise Desync("the ranks cannot follow each other", op="follow", calls=calls, seen=seen)
        raise UsageError(
            "a rank that has made no forward cannot follow: it does not know the order of modules",
            op="follow",
            seen=seen,
            fix="Let all ranks make one forward first, with any input.",
        )

    def exchange(self, number: int) -> list[int]:
        """Send which module this rank calls, or why none; return what all ranks have sent."""
        mine = torch.tensor([number], device=self._device)
        numbers = mine.new_empty(self._group.size())
        self._group.all_gather_single(numbers, mine)
        return numbers.tolist()

"""`follow`: forwards that some ranks make more often than others, such as those of a `generate`.

The block is a `Join`, whose joinable is the model's forwards: before each forward of the outermost
module a rank announces which module it calls. A rank that has reached the end of the block takes
part in the gathers of the others' forwards, and computes nothing.

    rank 0   forward   forward   forward   end
    rank 1   forward   end: . . follows, follows, ends with rank 0
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dure.comm.world import resolve
from dure.errors import UsageError
from dure.parallel.fsdp.explain import names_of
from dure.parallel.fsdp.state import FSDPState, state_of, states_in
from dure.parallel.fsdp.tree import Tree
from dure.training.join import Join, Joinable, JoinHook, JoinRound

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["follow"]


@contextmanager
def follow(model: nn.Module) -> Iterator[None]:
    """Let ranks make different numbers of forwards in a block, without gradients.

    A rank that leaves the loop waits at the end of the block for the others, and follows them.

    Args:
        model: Has sharded modules within, or is one. The loop calls its forward, not a method of
            it that was registered (`register_fsdp_forward_method`) and loops inside.

    Raises:
        ModuleError: Nothing of the model is sharded.
        UsageError: A forward with gradients; a block within a block; or, on all ranks, a rank that
            has never made a forward of the model is to follow one, whose order it does not know.
        Desync: Ranks call different modules.
        PeerLost: Another rank left the block with an error.

    Collective:
        All ranks of the mesh; of the world, where modules have several meshes.

    Cost:
        An all_reduce of 4 n bytes per forward, on n ranks.

    Example:
        ```python
        net = torch.nn.Linear(4, 2)
        fsdp.fully_shard(net)
        with fsdp.follow(net), torch.no_grad():
            for _ in range(1 + dist.get_rank()):             # a different number on each rank
                net(torch.ones(1, 4))
        ```
    """
    states = states_in(model, "follow")
    if any(state.announce is not None for state in states):
        raise UsageError("the block is within another for the same model", op="follow")
    forwards = _Forwards(model, states)
    with Join([forwards]):
        for state in states:
            state.announce = forwards.begin
        try:
            yield
        finally:
            for state in states:
                state.announce = None


class _Forwards(Joinable):
    """A model's forwards, as a joinable; the phase is the number of the module that is called."""

    def __init__(self, model: nn.Module, states: Sequence[FSDPState]) -> None:
        super().__init__()
        self.states = states
        self.modules = [module for state in states for module in state.modules]
        names = names_of(model)
        self._names = [names.get(module, "(outside)") for module in self.modules]
        groups = {p.axes.shard_group for s in states for g in s.groups for p in g.parameters}
        self._group = groups.pop() if len(groups) == 1 else resolve(None, "follow")

    def begin(self, module: nn.Module) -> None:
        """Announce that this rank begins a forward."""
        number = self.modules.index(module)
        if torch.is_grad_enabled():
            raise UsageError(
                "ranks follow forwards without gradients only",
                op="follow",
                seen=self.describe_phase(number),
                fix="Use torch.no_grad() as well.",
            )
        Join.notify_join_context(self, number)

    def describe_phase(self, phase: int) -> str:
        """Return which module is called."""
        return f"forward of {self._names[phase]}"

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return what a rank at the end of the block does."""
        return _Following(self)

    @property
    def join_device(self) -> torch.device:
        """The device of what ranks exchange."""
        return self._group.message_device

    @property
    def join_process_group(self) -> ProcessGroup:
        """The ranks that share the model."""
        return self._group


class _Following(JoinHook):
    """Takes part in other ranks' forwards."""

    preparation = "Let all ranks make one forward first, with any input."
    warns_of_many_rounds = False  # how long others generate is no matter of dividing inputs

    def __init__(self, forwards: _Forwards) -> None:
        self._forwards = forwards

    def can_shadow(self) -> bool:
        """Return whether this rank knows in which order modules are gathered, if they are."""
        states = self._forwards.states
        gathers = any(g.strategy.name != "shared" for s in states for g in s.groups)
        trees = {state.tree for state in states}
        return not gathers or any(tree is not None and tree.orders()[0] for tree in trees)

    def shadow(self, phase: int, round: JoinRound) -> None:
        """Take part in a forward."""
        entry = self._forwards.modules[phase]
        state = state_of(entry)
        assert state is not None
        (state.tree or Tree(state)).join_forward(entry)

"""`explain`: what `fully_shard` has made of a model, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dure.comm.queries import get_rank
from dure.parallel.fsdp.group import ParameterGroup
from dure.parallel.fsdp.state import FSDPState, states_in
from dure.tensor.watching import in_columns

__all__ = ["GroupLine", "Sharding", "explain", "names_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLine:
    """One group of parameters, which its strategy unshards together.

    Attributes:
        module: Path of the module that was given to `fully_shard`; "(root)" for the model itself.
        parameters: Their paths in the model.
        dtype: In which modules compute with them.
        trained: Whether they need gradients.
        numel: Elements of all unsharded parameters; under tensor parallel, of this rank's part.
        sharded_bytes: Of this rank's shards.
        whole_bytes: Of the unsharded parameters, which exist once per host with *shared*, and only
            while they are used with *gathered*.
        strategy: Its name.
        why: Why it was chosen.

    Obtained from:
        `Sharding.groups`.
    """

    module: str
    parameters: tuple[str, ...]
    dtype: torch.dtype
    trained: bool
    numel: int
    sharded_bytes: int
    whole_bytes: int
    strategy: str
    why: str


@dataclass(frozen=True, slots=True)
class Sharding:
    """What `fully_shard` has made of a model; its text is a table.

    Attributes:
        groups: In the order of the modules.
        plain: Paths of parameters that are not sharded, such as ignored ones.
        buffers: The dtype of each buffer by its path.
        forward, backward: Paths of the modules in the order in which they are gathered, each
            while the one before computes; empty before the first step.

    Obtained from:
        `dure.fsdp.explain`.
    """

    groups: tuple[GroupLine, ...]
    plain: tuple[str, ...]
    buffers: dict[str, torch.dtype]
    forward: tuple[str, ...]
    backward: tuple[str, ...]

    @property
    def trained_bytes(self) -> int:
        """Of this rank's trained shards; gradients take as many more, states of AdamW twice."""
        return sum(g.sharded_bytes for g in self.groups if g.trained)

    @property
    def frozen_bytes(self) -> int:
        """Of this rank's other shards, which have neither gradients nor state."""
        return sum(g.sharded_bytes for g in self.groups if not g.trained)

    def __str__(self) -> str:
        head = ("group", "parameters", "elements", "dtype", "trained", "shard", "whole", "strategy")
        lines = [
            in_columns([(*head, "why"), *map(_row, self.groups)], ruled=True),
            f"shards of this rank: {_bytes(self.trained_bytes)} trained (gradients take as much, "
            f"states of AdamW twice), {_bytes(self.frozen_bytes)} frozen",
        ]
        for name, order in (("forward", self.forward), ("backward", self.backward)):
            modules = " > ".join(order) if order else "known after the first step"
            lines.append(f"prefetched in {name}: {modules}")
        if self.plain:
            lines.append(f"not sharded: {', '.join(self.plain)}")
        dtypes = ", ".join(f"{name} {_short(dtype)}" for name, dtype in self.buffers.items())
        lines.append(f"buffers: {dtypes or 'none'}")
        return "\n".join(lines)


def explain(model: nn.Module) -> Sharding:
    """Print how a model is sharded: groups, bytes, strategies, and which modules are prefetched.

    Args:
        model: Has sharded modules within, or is one.

    Returns:
        The same, as values; global rank 0 prints it.

    Raises:
        ModuleError: Nothing of the model is sharded.

    Example:
        ```python
        net = torch.nn.Linear(4, 2)
        fsdp.fully_shard(net)
        sharding = fsdp.explain(net)
        assert sharding.groups[0].strategy == "shared"       # ranks on one host, CPU parameters
        ```
    """
    states = states_in(model, "fsdp.explain")
    names = names_of(model)
    of_states = {state: names.get(state.modules[0], "(outside)") for state in states}
    taken = {place for s in states for g in s.groups for p in g.parameters for place in p.places}
    tree = next((s.tree for s in states if s.tree is not None), None)
    forward, backward = tree.orders() if tree is not None else ((), ())
    sharding = Sharding(
        groups=tuple(_line(of_states[s], g, names) for s in states for g in s.groups),
        plain=tuple(
            _path(names[module], name)
            for module in names
            for name, _ in module.named_parameters(recurse=False)
            if (module, name) not in taken
        ),
        buffers={name: buffer.dtype for name, buffer in model.named_buffers()},
        forward=tuple(_ahead(forward, of_states, "forward_prefetch")),
        backward=tuple(_ahead(backward, of_states, "backward_prefetch")),
    )
    if get_rank() == 0:
        print(sharding)
    return sharding


def names_of(model: nn.Module) -> dict[nn.Module, str]:
    """Return the path of each module; "(root)" for the model itself."""
    return {module: path or "(root)" for path, module in model.named_modules()}


def _line(module: str, group: ParameterGroup, names: dict[nn.Module, str]) -> GroupLine:
    parameters = group.parameters
    places = [p.places[0] for p in parameters]
    return GroupLine(
        module=module,
        parameters=tuple(_path(names.get(m, "(outside)"), name) for m, name in places),
        dtype=parameters[0].dtype,
        trained=any(p.sharded.requires_grad for p in parameters),
        numel=sum(p.unsharded_shape.numel() for p in parameters),
        sharded_bytes=sum(p.part.nbytes for p in parameters),
        whole_bytes=sum(p.unsharded_shape.numel() * p.dtype.itemsize for p in parameters),
        strategy=group.strategy.name,
        why=group.strategy.why,
    )


def _path(module: str, name: str) -> str:
    return name if module == "(root)" else f"{module}.{name}"


def _ahead(order: Sequence[FSDPState], names: dict[FSDPState, str], asked: str) -> Iterator[str]:
    """Give the paths of `order`, each followed by what the user wants gathered when it begins."""
    for state in order:
        more = [names.get(s, "(outside)") for s in getattr(state, asked)]
        yield names.get(state, "(outside)") + (f" (with {', '.join(more)})" if more else "")


def _row(line: GroupLine) -> tuple[str, ...]:
    return (
        line.module,
        str(len(line.parameters)),
        f"{line.numel:,}",
        _short(line.dtype),
        "yes" if line.trained else "no",
        _bytes(line.sharded_bytes),
        _bytes(line.whole_bytes),
        line.strategy,
        line.why,
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"

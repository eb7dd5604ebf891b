"""The memory of each rank, for a transformer of Llama's shape on a mesh of any axes.

Everything is counted in elements first, from the formulas below, and then in bytes:

    a layer's parameters   2 w^2 + 2 w k   attention (q and out; keys and values, k features)
                         + 3 w h           SwiGLU
                         + 2 w             norms
    the ends               v w each        embedding, scores

    a layer's activations, for one token of one microbatch, kept from forward to backward:
                         (4 w + 2) / t     inputs of the norms, and those inputs scaled
                         + 2 w             inputs of q, k, v and of gate, up (gathered along tp)
                         + (2 w + 2 k + a) / t   q, k, v, the output, and a log-sum for each head
                         + 4 h / t         gate, up, silu, their product

    or, with experts:      e (4 h + 3 w) / t   e experts a token: its row, its output, weighted
                         + 4 s h / t       s experts that are shared

with w, h, k, a, v the width, hidden units, features of keys, heads, vocabulary, and t ranks along
tp, with sequence parallelism. A recomputed layer keeps its input alone, w / t; one layer at a time
keeps the rest.

How many microbatches are live at once is the schedule's (`dure.schedules`). With several
microbatches a stage's gradients are added up unsharded, and divided once, after the last. Memory
that ranks of `dure run` keep of freed memory is counted; the rest of a process (Python and torch,
some 300 MB) is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dure.errors import UsageError
from dure.schedules import Action, Kind, find_generator, make_schedule

__all__ = ["Memory", "Mesh", "Model", "Training", "kept_elements", "memory"]

FREED = 64 << 20
"""Bytes of freed memory that a rank of `dure run` keeps (docs/launch.md)."""

SCORE_BYTES = 12
"""Of each score of the vocabulary, at the peak of the loss: in float32 it, its logarithm and its
gradient; in 2 bytes it and its gradient, in float32 its copy and the copy's gradient."""

_OP = "plan.memory"


@dataclass(frozen=True)
class Model:
    """The sizes of a transformer of Llama's shape.

    Attributes:
        vocabulary: Size of the vocabulary.
        width: Features of an activation.
        layers: Number of layers.
        heads: Heads of the queries.
        groups: Heads of the keys and values.
        hidden: Hidden units of a layer's MLP, or of one expert.
        length: Tokens of a sequence.
        experts: Experts of a layer; 0 for an MLP.
        active: Experts that process each token.
        shared: Additional experts that process every token.
        tied: 1 if the output layer uses the embedding's weights, else 0.
        gated: 1 if the MLP has a gate (SwiGLU, three matrices), else 0 (two matrices).

    Example:
        ```python
        from dure import plan

        model = plan.Model(
            vocabulary=32000, width=4096, layers=32, heads=32, groups=32, hidden=11008, length=4096
        )
        assert round(model.parameters / 1e9, 1) == 6.7
        ```
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    groups: int
    hidden: int
    length: int
    experts: int = 0
    active: int = 2
    shared: int = 0
    tied: int = 0
    gated: int = 1

    @staticmethod
    def of_size(parameters: float, *, vocabulary: int = 128_256, length: int = 4096) -> Model:
        """Return a model with about some number of parameters, in Llama's proportions.

        The width is 128 times the number of layers, heads have 128 features, four heads share keys
        and values, and the MLP has 3.5 times the width.

        Args:
            parameters: Number of parameters.
            vocabulary: Size of the vocabulary.
            length: Tokens of a sequence.

        Returns:
            The model of these proportions with the nearest number of parameters.
        """

        def shaped(layers: int) -> Model:
            width, groups = 128 * layers, max(1, layers // 4)
            return Model(vocabulary, width, layers, layers, groups, 448 * layers, length)

        return min(map(shaped, range(1, 400)), key=lambda m: abs(m.parameters - parameters))

    @staticmethod
    def parse(text: str) -> Model:
        """Parse sizes, such as ``layers=32,width=4096,heads=32,groups=8,hidden=14336``.

        Args:
            text: Names of attributes with integers; layers and width are required. The defaults
                are those of `of_size`, but with as many heads of keys as of queries.

        Returns:
            The model.

        Raises:
            UsageError: An unknown name, an invalid number, or no layers or width.
        """
        sizes = _numbers(text, Model)
        if not {"width", "layers"} <= sizes.keys():
            raise UsageError(
                "a model needs a width and layers",
                seen=repr(text),
                fix="Write layers=32,width=4096,...",
            )
        width = sizes["width"]
        heads = sizes.get("heads", max(1, width // 128))
        usual = {"heads": heads, "groups": heads, "hidden": 7 * width // 2}
        return Model(**{"vocabulary": 128_256, "length": 4096} | usual | sizes)

    @property
    def keys(self) -> int:
        """Features of the keys, and of the values."""
        return self.width // self.heads * self.groups

    @property
    def attention_parameters(self) -> int:
        """Parameters of a layer's attention and norms."""
        return 2 * self.width * (self.width + self.keys) + 2 * self.width

    @property
    def expert_parameters(self) -> int:
        """Parameters of the MLP, or of one expert."""
        return (2 + self.gated) * self.width * self.hidden

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer, including all experts and their router."""
        if not self.experts:
            return self.attention_parameters + self.expert_parameters
        router = self.width * self.experts
        experts = (self.experts + self.shared) * self.expert_parameters
        return self.attention_parameters + router + experts

    @property
    def parameters(self) -> int:
        """Parameters of all layers, the embedding, the last norm and the output layer."""
        ends = self.vocabulary * self.width * (1 if self.tied else 2) + self.width
        return self.layers * self.layer_parameters + ends


@dataclass(frozen=True)
class Mesh:
    """The number of ranks along each axis; each rank along dp and fsdp has its own microbatches.

    Attributes:
        pp: Ranks of the pipeline.
        dp: Replicas.
        fsdp: Shards of parameters, gradients and optimizer state.
        cp: Parts of a sequence; these ranks also shard parameters.
        tp: Parts of each layer.
        ep: Parts of the experts; divides dp * fsdp * cp.

    Example:
        ```python
        mesh = plan.Mesh(fsdp=8, tp=2)
        assert mesh.ranks == 16
        ```
    """

    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @staticmethod
    def parse(text: str) -> Mesh:
        """Parse axes, such as ``pp=4,dp=2,tp=2``.

        Args:
            text: Names of axes with numbers of ranks.

        Returns:
            The mesh; other axes have one rank.

        Raises:
            UsageError: An unknown axis, or an invalid number.
        """
        return Mesh(**_numbers(text, Mesh))

    @property
    def ranks(self) -> int:
        """Number of ranks; ep divides the ranks of dp, fsdp and cp."""
        return self.pp * self.dp * self.fsdp * self.cp * self.tp


@dataclass(frozen=True)
class Training:
    """Options of the training.

    Attributes:
        sequences: Sequences of a microbatch of one rank.
        microbatches: Microbatches of a step.
        schedule: Name of the pipeline's schedule in `dure.schedules`.
        parameter_bytes: Bytes of a parameter, and of its gradient.
        compute_bytes: Bytes of an activation, and of a gathered parameter.
        state_elements: Elements of optimizer state per parameter: 2 for AdamW.
        recompute: Whether backward recomputes the activations of layers.
        gathers: Whether ranks along fsdp gather parameters, as over hosts and with devices; False
            for ranks of one host that share memory.

    Example:
        ```python
        training = plan.Training(sequences=2, parameter_bytes=4, compute_bytes=2, recompute=True)
        ```
    """

    sequences: int = 1
    microbatches: int = 1
    schedule: str = "1f1b"
    parameter_bytes: int = 4
    compute_bytes: int = 4
    state_elements: int = 2
    recompute: bool = False
    gathers: bool = True


@dataclass(frozen=True)
class Memory:
    """The memory of a rank in bytes; ranks with the same place along pp have the same.

    Attributes:
        stages: The layers of each stage of the rank.
        parameters: Its shards of parameters.
        gradients: Its shards of gradients.
        optimizer: Optimizer state of its shards.
        activations: Activations of all microbatches that are live at once.
        scores: Scores of the last stage, their logarithms and gradient.
        gathered: Temporarily unsharded parameters, and unsharded gradients.
        freed: Freed memory that the allocator keeps.

    Obtained from:
        `dure.plan.memory`.
    """

    stages: tuple[range, ...]
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    scores: int
    gathered: int
    freed: int = FREED

    @property
    def total(self) -> int:
        """The sum of all."""
        held = self.parameters + self.gradients + self.optimizer
        return held + self.activations + self.scores + self.gathered + self.freed


def memory(model: Model, mesh: Mesh, training: Training | None = None) -> list[Memory]:
    """Return the memory of the ranks at the peak of a step.

    Args:
        model: Sizes of the model.
        mesh: Ranks along each axis.
        training: Microbatches, schedule and dtypes; None for the defaults.

    Returns:
        One entry per place along pp.

    Raises:
        UsageError: The mesh does not divide the model; the message names the rule.

    Example:
        ```python
        from dure import plan

        (rank,) = plan.memory(plan.find_model("llama3-8b"), plan.Mesh(fsdp=8))
        assert rank.total > 0
        ```
    """
    training = training or Training()
    _check(model, mesh)
    generator = find_generator(training.schedule)
    n_stages = mesh.pp * (generator.stages_a_rank or _STAGES_OF_INTERLEAVED)
    if n_stages > model.layers:
        raise UsageError(
            "each stage has at least one layer",
            op=_OP,
            seen=f"{model.layers} layers, {n_stages} stages of {generator.name}",
            fix=f"Take pp={max(1, model.layers * mesh.pp // n_stages)}.",
        )
    schedule = make_schedule(
        training.schedule, stages=n_stages, microbatches=training.microbatches, ranks=mesh.pp
    )
    cuts = [stage * model.layers // n_stages for stage in range(n_stages + 1)]
    stages = [range(a, b) for a, b in pairwise(cuts)]
    found: list[Memory] = []
    for rank in range(mesh.pp):
        mine = [i for i, place in enumerate(schedule.placement) if place == rank]
        kept = {i: _activations(model, mesh, training, len(stages[i])) for i in mine}
        live = _most_live(schedule.actions(rank), kept)
        found.append(_rank(model, mesh, training, [stages[i] for i in mine], live))
    return found


_STAGES_OF_INTERLEAVED = 2


def _numbers(text: str, kind: type[Mesh] | type[Model]) -> dict[str, int]:
    """Read names of a class's fields with their numbers."""
    names = kind.__dataclass_fields__
    found: dict[str, int] = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        name, _, number = part.partition("=")
        least = 0 if name in ("experts", "shared", "tied", "gated") else 1
        if name not in names or not number.isdecimal() or int(number) < least:
            raise UsageError(
                f"a {kind.__name__.lower()} must be names with numbers of at least 1",
                seen=repr(part),
                fix=f"Write {next(iter(names))}=4 and so on; names: {', '.join(names)}.",
            )
        found[name] = int(number)
    return found


def _check(model: Model, mesh: Mesh) -> None:
    wrong = (
        (model.heads % mesh.tp, f"tp divides the heads: {model.heads}"),
        (model.groups % mesh.tp, f"tp divides the heads of keys: {model.groups}"),
        (model.length % (2 * mesh.cp), f"2 cp divides the length: {model.length}"),
        (max(model.experts, 1) % mesh.ep, f"ep divides the experts: {model.experts}"),
        (mesh.dp * mesh.fsdp * mesh.cp % mesh.ep, "ep divides dp * fsdp * cp"),
    )
    for rest, rule in wrong:
        if rest:
            raise UsageError("the mesh does not divide the model", op=_OP, seen=f"{mesh}", fix=rule)


def _activations(model: Model, mesh: Mesh, training: Training, layers: int) -> int:
    """Return the bytes that a stage keeps of one microbatch."""
    tokens = training.sequences * model.length // mesh.cp
    if training.recompute:
        return layers * tokens * model.width // mesh.tp * training.compute_bytes
    return layers * _layer_activations(model, mesh, tokens) * training.compute_bytes


def _layer_activations(model: Model, mesh: Mesh, tokens: int) -> int:
    """Return the elements that one layer keeps (see the top of this file)."""
    w, k, h, t = model.width, model.keys, (1 + model.gated) * model.hidden, mesh.tp
    units = 2 * h
    if model.experts:
        units = model.active * (2 * h + 3 * w) + model.shared * 2 * h + model.experts
    return tokens * (kept_elements(w, k, model.heads, units) // t + 2 * w)


def kept_elements(width: Any, keys: Any, heads: Any, units: Any) -> Any:
    """Return the elements that a layer keeps of a token, which tp divides; numbers or columns.

    Args:
        width: Features of an activation.
        keys: Of the keys.
        heads: Of the queries.
        units: Elements that the MLP keeps: 4 times its hidden units with a gate, 2 times without.
    """
    return 6 * width + 2 + 2 * keys + heads + units


def _most_live(actions: Sequence[Action | None], kept: dict[int, int]) -> int:
    """Return the most bytes that are live at once: from a forward to the end of its backward."""
    live = most = 0
    for action in actions:
        for part in action.parts if action is not None else ():
            if part.kind is Kind.FORWARD:
                live += kept[part.stage]
            elif part.kind in (Kind.FULL_BACKWARD, Kind.BACKWARD_WEIGHT):
                live -= kept[part.stage]
            most = max(most, live)
    return most


def _rank(
    model: Model, mesh: Mesh, training: Training, stages: Sequence[range], activations: int
) -> Memory:
    """Add up what a rank holds."""
    tokens = training.sequences * model.length // mesh.cp
    is_first = any(0 in part for part in stages)
    is_last = any(model.layers - 1 in part for part in stages)
    n_layers = sum(map(len, stages))
    end = model.vocabulary * model.width
    ends = (
        end * (is_first + is_last - (model.tied and is_first and is_last)) + model.width * is_last
    )
    experts = model.experts * model.expert_parameters
    dense = (model.layer_parameters - experts) * n_layers + ends
    shards = mesh.fsdp * mesh.cp
    own = dense // (mesh.tp * shards) + experts * n_layers // max(mesh.ep * mesh.tp, shards)
    unsharded = (dense + experts // mesh.ep * n_layers) // mesh.tp
    layer = (model.layer_parameters - experts + experts // mesh.ep) // mesh.tp
    added_up = unsharded if training.microbatches > 1 else min(unsharded, layer)
    gathered = added_up * training.parameter_bytes
    if shards > 1 and training.gathers:
        held = unsharded if mesh.pp > 1 else min(unsharded, ends // mesh.tp + 2 * layer)
        gathered += held * training.compute_bytes
    if training.recompute and n_layers:
        activations += _layer_activations(model, mesh, tokens) * training.compute_bytes
    scores = SCORE_BYTES * tokens * model.vocabulary // mesh.tp if is_last else 0
    size = own * training.parameter_bytes
    return Memory(
        stages=tuple(stages),
        parameters=size,
        gradients=size,
        optimizer=training.state_elements * size,
        activations=activations,
        scores=scores,
        gathered=gathered,
    )

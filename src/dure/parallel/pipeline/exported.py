"""`pipeline`: a model cut into stages by `torch.export`, at submodules or at `pipe_split()`.

The exported graph is one list of operations. It is cut at the marks. A value that crosses a border,
an activation or an argument of the model that a later stage uses, is an output of the stage before
it and an input of the one after: values for a stage further on travel through those between. A
parameter that several stages use belongs to each of them, and is tied.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import fx, nn
from torch.fx.node import has_side_effect

from dure.errors import ModuleError
from dure.parallel.pipeline.stage import PipelineStage
from dure.torch_private import PyTreeCodeGen, PyTreeInfo, pytree

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["Pipe", "PipeInfo", "SplitPoint", "build_stage", "pipe_split", "pipeline"]

torch.library.define("dure::pipe_split", "() -> ()")


@torch.library.impl("dure::pipe_split", "BackendSelect")
def _mark() -> None:
    return None


torch.library.register_fake("dure::pipe_split", _mark)
_MARK: Any = torch.ops.dure.pipe_split.default  # pyright: ignore[reportAttributeAccessIssue]
has_side_effect(_MARK)


def pipe_split() -> None:
    """Mark, in a model's forward, where a stage ends and the next begins.

    Example:
        ```python
        from dure import pipelining

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)

            def forward(self, x):
                x = self.first(x)
                pipelining.pipe_split()
                return self.second(x)

        pipe = pipelining.pipeline(Model(), (torch.ones(1, 4),))
        assert pipe.num_stages == 2
        ```
    """
    torch.ops.dure.pipe_split()  # pyright: ignore[reportAttributeAccessIssue]


class SplitPoint(Enum):
    """Where to cut at a submodule.

    Example:
        ```python
        from dure import pipelining

        at = {"layers.4": pipelining.SplitPoint.BEGINNING}  # split_spec of `pipeline`
        ```
    """

    BEGINNING = 1
    """Before it: it is the first of a stage."""
    END = 2
    """After it: it is the last of a stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeInfo:
    """A stage's place in the pipe, and metadata of all stages.

    Attributes:
        num_stages: How many there are.
        graph: All of them, as one graph.
        tied: Paths of parameters that several stages use, by stage.

    Obtained from:
        `Pipe.info`.
    """

    num_stages: int
    graph: fx.Graph
    tied: Mapping[int, tuple[str, ...]]


class Pipe(nn.Module):
    """A model that was cut into stages; calling it runs them one after the other, on this rank.

    Parameters of a stage have the paths that they have in the model, so that its state dictionary
    is a part of the model's.

    Attributes:
        num_stages: How many there are.
        split_gm: Has the stages as submodules `submod_0`, `submod_1`, ..., and calls them in order.

    Obtained from:
        `pipeline`.
    """

    def __init__(self, stages: list[fx.GraphModule], graph: fx.Graph) -> None:
        super().__init__()
        self.split_gm = _joined(stages)
        self._graph = graph
        self.num_stages = len(stages)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Run the model and return its outputs as a flat tuple, as in torch.

        A stage that a schedule runs returns what the model returns.
        """
        return tuple(pytree.tree_leaves(self.split_gm(*args, **kwargs)))

    def get_stage_module(self, stage_idx: int) -> nn.Module:
        """Return a stage.

        Raises:
            ModuleError: `stage_idx` is negative or too large.
        """
        if not 0 <= stage_idx < self.num_stages:
            raise ModuleError(
                "there is no such stage",
                op="get_stage_module",
                seen=f"{stage_idx}, of {self.num_stages} stages",
            )
        return self.split_gm.get_submodule(f"submod_{stage_idx}")

    @property
    def _stages(self) -> list[nn.Module]:
        return [self.get_stage_module(i) for i in range(self.num_stages)]

    def print_readable(self) -> None:
        """Print the code of the model and of its stages."""
        self.split_gm.print_readable()

    def info(self) -> PipeInfo:
        """Return what `build_stage` needs."""
        users: dict[nn.Parameter, int] = {}
        for stage in self._stages:
            for parameter in stage.parameters():
                users[parameter] = users.get(parameter, 0) + 1
        tied = {
            i: tuple(name for name, p in stage.named_parameters() if users[p] > 1)
            for i, stage in enumerate(self._stages)
        }
        return PipeInfo(num_stages=self.num_stages, graph=self._graph, tied=tied)

    def build_stage(
        self, stage_index: int, device: torch.device, group: ProcessGroup | None = None
    ) -> PipelineStage:
        """Return a stage that a schedule takes; see `build_stage`."""
        stage = self.get_stage_module(stage_index)
        return build_stage(stage, stage_index, self.info(), device, group)

    def __str__(self) -> str:
        codes = (cast("fx.GraphModule", stage).code for stage in self._stages)
        return "\n".join(f"# stage {i}\n{code.strip()}" for i, code in enumerate(codes))


def _joined(stages: list[fx.GraphModule]) -> fx.GraphModule:
    """Return a module that calls the stages one after the other."""
    graph, info = fx.Graph(), getattr(stages[0].graph._codegen, "pytree_info", None)  # pyright: ignore[reportPrivateUsage]
    inputs = [n.name for n in stages[0].graph.nodes if n.op == "placeholder"]
    given = [graph.placeholder(name) for name in (inputs if info is None else info.orig_args)]
    value = graph.call_module("submod_0", tuple(given))
    for i, stage in enumerate(stages[1:], 1):
        count = sum(node.op == "placeholder" for node in stage.graph.nodes)
        each = [graph.call_function(operator.getitem, (value, k)) for k in range(count)]
        value = graph.call_module(f"submod_{i}", tuple(each))
    graph.output(value)
    modules: dict[str, Any] = {f"submod_{i}": stage for i, stage in enumerate(stages)}
    return fx.GraphModule(modules, graph, class_name="Pipe")


def build_stage(
    stage_module: nn.Module,
    stage_index: int,
    pipe_info: PipeInfo,
    device: torch.device,
    group: ProcessGroup | None = None,
) -> PipelineStage:
    """Return the stage of a `Pipe` as a schedule takes it, on `device`.

    Args:
        stage_module: `Pipe.get_stage_module(stage_index)`, perhaps wrapped.
        stage_index: Which one.
        pipe_info: `Pipe.info()`.
        device: Where it computes; parameters that have values are moved there.
        group: The ranks of the pipeline.

    Returns:
        The stage.

    Example:
        ```python
        rank = dist.get_rank()
        stage = pipelining.build_stage(
            pipe.get_stage_module(rank), rank, pipe.info(), torch.device("cpu")
        )
        assert (stage.is_first, stage.is_last) == (rank == 0, rank == 1)
        ```
    """
    if not any(p.is_meta for p in stage_module.parameters()):
        stage_module.to(device)
    return PipelineStage(
        stage_module,
        stage_index,
        pipe_info.num_stages,
        device,
        group=group,
        tied={name: name for name in pipe_info.tied.get(stage_index, ())},
    )


def pipeline(
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: dict[str, Any] | None = None,
    split_spec: dict[str, SplitPoint] | None = None,
    split_policy: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
) -> Pipe:
    """Cut a model into stages.

    Args:
        module: The model, which `torch.export` takes.
        mb_args, mb_kwargs: Arguments of one microbatch, for its shapes.
        split_spec: Where to cut, by the paths of submodules. Without it, and without a policy, at
            the calls of `pipe_split()` in its forward.
        split_policy: Gets the exported graph, and inserts calls of `pipe_split` into it.

    Returns:
        The stages: `Pipe.build_stage(i, device)` for a schedule.

    Raises:
        ModuleError: Both ways to cut were given, a path leads to no module, or a stage would have
            nothing to do.

    Example:
        ```python
        layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        at = {"1": pipelining.SplitPoint.BEGINNING}
        assert pipelining.pipeline(layers, (torch.ones(1, 4),), split_spec=at).num_stages == 2
        ```
    """
    if split_spec is not None and split_policy is not None:
        raise ModuleError(
            "a model is cut in one way",
            op="pipeline",
            seen="split_spec and split_policy were both given",
            fix="Give one of them.",
        )
    with _marked(module, split_spec or {}):
        exported: Any = torch.export.export(module, tuple(mb_args), mb_kwargs or {}, strict=False)
    full: fx.GraphModule = exported.module(check_guards=False)
    if split_policy is not None:
        full = split_policy(full)
    return Pipe(_Cut(full).stages(), full.graph)


@contextmanager
def _marked(module: nn.Module, spec: Mapping[str, SplitPoint]) -> Iterator[None]:
    """Have submodules mark where they begin or end."""
    handles: list[Any] = []
    try:
        for path, point in spec.items():
            try:
                inner = module.get_submodule(path)
            except AttributeError:
                raise ModuleError("there is no such submodule", op="pipeline", seen=path) from None
            if point is SplitPoint.BEGINNING:
                handles.append(inner.register_forward_pre_hook(lambda *_: pipe_split()))
            else:
                handles.append(inner.register_forward_hook(lambda *_: pipe_split()))
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Cut:
    """The parts of an exported graph, and what crosses their borders."""

    def __init__(self, full: fx.GraphModule) -> None:
        self._full = full
        self._parts: list[list[fx.Node]] = [[]]
        self._inputs = [n for n in full.graph.nodes if n.op == "placeholder"]
        self._output = next(n for n in full.graph.nodes if n.op == "output")
        for node in full.graph.nodes:
            if node.target is _MARK:
                self._parts.append([])
            elif node.op not in ("placeholder", "output", "get_attr"):
                self._parts[-1].append(node)
        empty = [i for i, part in enumerate(self._parts) if not part]
        if empty:
            raise ModuleError(
                "a stage would have nothing to do",
                op="pipeline",
                seen=f"stages {empty} of {len(self._parts)}",
                fix="Cut elsewhere: not before the first operation, nor twice at one place.",
            )
        self._made_in = {node: i for i, part in enumerate(self._parts) for node in part}
        self._made_in.update(dict.fromkeys(self._inputs, -1))
        self._borders = [self._crossing(i) for i in range(len(self._parts) - 1)]

    def _crossing(self, border: int) -> list[fx.Node]:
        """Return what is made up to stage `border`, and used after it."""
        later = [node for part in self._parts[border + 1 :] for node in part] + [self._output]
        needed = {each for node in later for each in node.all_input_nodes}
        return [n for n, i in self._made_in.items() if i <= border and n in needed]

    def stages(self) -> list[fx.GraphModule]:
        """Return a module for each part."""
        return [self._stage(i) for i in range(len(self._parts))]

    def _stage(self, index: int) -> fx.GraphModule:
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self._inputs if index == 0 else self._borders[index - 1]:
            copies[node] = graph.placeholder(node.name)

        def copied(node: fx.Node) -> fx.Node:
            if node not in copies:  # a parameter or buffer, wherever it is used
                copies[node] = graph.node_copy(node)
            return copies[node]

        for node in self._parts[index]:
            copies[node] = graph.node_copy(node, copied)
        codegen: Any = self._full.graph._codegen  # pyright: ignore[reportPrivateUsage]
        info: Any = getattr(codegen, "pytree_info", None)
        if index == len(self._parts) - 1:
            results = [
                copied(r) if isinstance(r, fx.Node) else r
                for r in cast("tuple[Any, ...]", self._output.args[0])
            ]
            tree = None if info is None else info.out_spec
            graph.output(results[0] if tree is None else pytree.tree_unflatten(results, tree))
        else:
            graph.output(tuple(copied(node) for node in self._borders[index]))
        if index == 0 and info is not None:
            graph.set_codegen(PyTreeCodeGen(PyTreeInfo(info.orig_args, info.in_spec, None)))
        graph.lint()
        return fx.GraphModule(self._full, graph, class_name=f"Stage{index}")

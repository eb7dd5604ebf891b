"""`CommDebugMode` counts collectives; `visualize_sharding` draws which rank has which elements."""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed._functional_collectives  # defines torch.ops.c10d_functional # pyright: ignore
from torch import nn
from torch.nn.modules import module as hooks

from dure.errors import PlacementError
from dure.tensor.dtensor import DTensor
from dure.tensor.redistribute import Move
from dure.tensor.watching import Operation, OperationRecorder, in_columns

__all__ = ["CommCounts", "CommDebugMode", "visualize_sharding"]

_MOVES = {
    Move.ALL_GATHER: "c10d_functional.all_gather_into_tensor",
    Move.ALL_REDUCE: "c10d_functional.all_reduce",
    Move.REDUCE_SCATTER: "c10d_functional.reduce_scatter_tensor",
    Move.ALL_TO_ALL: "c10d_functional.all_to_all_single",
}
_PLAIN = {
    "all_gather": "allgather_",
    "all_gather_single": "_allgather_base_",
    "all_reduce": "allreduce_",
    "all_reduce_coalesced": "allreduce_coalesced_",
    "all_to_all": "alltoall_",
    "all_to_all_single": "alltoall_base_",
    "reduce_scatter": "reduce_scatter_",
    "reduce_scatter_single": "_reduce_scatter_base_",
    "barrier": "barrier",
    "send": "send",
}
"""Names of torch's operators; other names are those of Dure with an underscore at the end."""
_FUNCTIONAL = {
    "all_gather": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "all_to_all": "all_to_all_single",
    "reduce_scatter": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}
"""Names of torch's functional collectives; other names are those of Dure."""
_operators: dict[str, Any] = {}
"""Operators by name. torch makes them at their first use: two for two threads at once."""
_TRIVIAL = ("aten.detach.", "aten.t.", "aten.view.", "aten.alias.", "aten.transpose.")


def _operator(key: Any) -> Any:
    """Return the operator of torch under which a key is counted, or its name if torch has none.

    Torch counts its functional collectives under their older names, without the underscore.
    """
    name = str(key).removeprefix("torch.ops.").replace("_c10d_functional.", "c10d_functional.")
    space, _, operator = name.partition(".")
    operator = operator.partition(".")[0]  # without the overload
    found = getattr(getattr(torch.ops, space), operator, None) if operator else None
    return name if found is None else _operators.setdefault(f"{space}.{operator}", found)


class CommCounts(dict[Any, int]):
    """The number of calls of each collective; 0 for collectives that were not called.

    Keys are operators of torch, such as ``torch.ops.c10d_functional.all_reduce``. Look-ups also
    accept ``torch.ops._c10d_functional.all_reduce`` and names ("c10d_functional.all_reduce").

    Obtained from:
        `CommDebugMode.get_comm_counts`.
    """

    def __getitem__(self, key: Any) -> int:
        return dict.get(self, _operator(key), 0)

    def get(self, key: Any, default: Any = None) -> Any:
        """Return a count, or `default` if the collective was not called.

        Args:
            key: The collective, as an operator of torch or its name.
            default: The result for collectives that were not called.
        """
        return dict.get(self, _operator(key), default)

    def __contains__(self, key: object) -> bool:
        return dict.__contains__(self, _operator(key))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        return dict(self) == {_operator(key): n for key, n in other.items()}  # pyright: ignore

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def _counts(operations: list[Operation]) -> CommCounts:
    found: Counter[str] = Counter()
    for one in operations:
        found.update(_MOVES[step.move] for step in one.steps)
        for name in one.plain:
            if one.functional or one.name:
                found["c10d_functional." + _FUNCTIONAL.get(name, name)] += 1
            else:
                found["c10d." + _PLAIN.get(name, name + "_")] += 1
    return CommCounts({_operator(name): count for name, count in found.items()})


def _by_name(operations: list[Operation]) -> dict[str, int]:
    """Return the counts under the operators' names, in their order."""
    return dict(sorted((str(key), count) for key, count in _counts(operations).items()))


class CommDebugMode:
    """Counts the collectives that this rank calls in a ``with`` block, by module.

    Functional collectives, redistributions and the communication of operators on DTensors count as
    torch's functional collectives (``c10d_functional.*``), all others as ``c10d.*_``.

    Threads:
        Operators are recorded on the thread that enters, collectives on all threads. Ranks that are
        threads count their own calls.

    Example:
        ```python
        from dure.tensor import Shard, distribute_tensor, init_device_mesh
        from dure.tensor.debug import CommDebugMode

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        with CommDebugMode() as counted:
            x.full_tensor()
        assert counted.get_total_counts() == 1
        assert counted.get_comm_counts()["c10d_functional.all_gather_into_tensor"] == 1
        ```
    """

    def __init__(self) -> None:
        self._watch = OperationRecorder(self._current)
        self._running: list[str] = []
        self._modules: list[str] = []
        self._kinds: dict[str, str] = {}
        self._names: dict[nn.Module, str] = {}
        self._parameters: dict[str, dict[str, torch.Tensor]] = {}
        self._sharding: dict[str, Any] = {}
        self._hooks: list[Any] = []
        self._thread = 0

    def __enter__(self) -> Self:
        self.__init__()
        self._thread = threading.get_ident()
        self._hooks = [
            hooks.register_module_forward_pre_hook(self._enter_module),
            hooks.register_module_forward_hook(self._leave_module, always_call=True),
        ]
        self._watch.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._watch.__exit__(*raised)
        for hook in self._hooks:
            hook.remove()

    def _current(self) -> str:
        return self._running[-1] if self._running else ""

    def _enter_module(self, module: nn.Module, inputs: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if not self._running:
            root = type(module).__name__
            for inner, submodule in module.named_modules():
                self._names[submodule] = f"{root}.{inner}" if inner else root
        name = self._names.get(module, type(module).__name__)
        self._running.append(name)
        if name in self._kinds:
            return
        self._modules.append(name)
        self._kinds[name] = type(module).__name__
        own = {key: p.data for key, p in module.named_parameters(recurse=False)}
        if own:
            self._parameters[name] = own
        for key, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, DTensor):
                self._sharding[f"{name}.{key}"] = parameter.placements

    def _leave_module(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if threading.get_ident() == self._thread and self._running:
            self._running.pop()

    # ---------------------------------------------------------------- results

    def get_total_counts(self) -> int:
        """Return the number of collectives that were called."""
        return sum(self.get_comm_counts().values())

    def get_comm_counts(self) -> CommCounts:
        """Return the number of calls of each collective; see `CommCounts` for the keys."""
        return _counts(self._watch.operations)

    @property
    def comm_counts(self) -> CommCounts:
        """The number of calls of each collective, as `get_comm_counts` returns it."""
        return self.get_comm_counts()

    @property
    def comm_module_counts(self) -> dict[str, dict[str, CommCounts]]:
        """Counts of each module and its submodules, under "forward" and "backward".

        "Global" contains the counts of the complete block, including code outside of modules.
        Modules without collectives are left out. Collectives of a backward pass count under
        "Global" only.
        """
        found: dict[str, dict[str, CommCounts]] = {}
        for module in (None, *self._modules):
            forward, backward = (_counts(self._of(module, part)) for part in (False, True))
            if module is None or forward or backward:
                found[module or "Global"] = {"forward": forward, "backward": backward}
        return found

    def get_parameter_info(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the parameters of each module that ran, by names of the module and parameter."""
        return self._parameters

    def get_sharding_info(self) -> dict[str, Any]:
        """Return the placements of each parameter that is a DTensor, of the modules that ran."""
        return self._sharding

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """Return operators and collectives as text, by module, forward and backward.

        Backward is listed under "Global" only: autograd does not know the module of an operator.

        Args:
            noise_level: 0: collectives; 1: also operators on DTensors that communicate; 2: all
                operators except trivial views; 3: all, with module types and parameters.
        """
        lines = ["Global", *self._lines(None, noise_level, "  ")]
        for name in self._modules:
            indent = "  " * (name.count(".") + 1)
            lines.append(f"{indent}{name}")
            if noise_level >= 3:
                lines.append(f"{indent}  *module type: {self._kinds[name]}")
                for key, tensor in self._parameters.get(name, {}).items():
                    placements = self._sharding.get(f"{name}.{key}", "plain")
                    lines.append(f"{indent}  *parameter {key}: {list(tensor.shape)} {placements}")
            lines += self._lines(name, noise_level, indent + "  ")
        return "\n".join(lines)

    def _of(self, module: str | None, backward: bool) -> list[Operation]:
        """Return the operations of a module and its submodules; None: all."""
        return [
            one
            for one in self._watch.operations
            if one.backward == backward
            and (module is None or one.module == module or one.module.startswith(module + "."))
        ]

    def _lines(self, module: str | None, noise: int, indent: str) -> list[str]:
        lines: list[str] = []
        for title, backward in (("FORWARD PASS", False), ("BACKWARD PASS", True)):
            operations = self._of(module, backward)
            found = [f"{indent}  *{key}: {n}" for key, n in _by_name(operations).items()]
            own = [one for one in operations if one.module == (module or "") and one.name]
            for one in own:
                quiet = one.name.startswith(_TRIVIAL)
                if noise < 1 or (noise < 3 and quiet) or (noise < 2 and not one.steps):
                    continue
                places = ", ".join(map(str, one.inputs))
                found.append(f"{indent}  **{one.name}({places}) {one.why()}".rstrip())
            if found:
                lines += [f"{indent}{title}", *found]
        return lines

    def generate_json_dump(
        self, file_name: str = "comm_mode_log.json", noise_level: int = 3
    ) -> None:
        """Write modules with their counts and operators to a JSON file.

        Args:
            file_name: The file.
            noise_level: 0: collectives; 1 and above: also operators on DTensors.
        """

        def entry(module: str | None) -> dict[str, Any]:
            found: dict[str, Any] = {}
            for key, backward in (("forward", False), ("backward", True)):
                operations = self._of(module, backward)
                found[key] = {"collectives": _by_name(operations)}
                if noise_level >= 1:
                    found[key]["operations"] = [
                        {"name": one.name, "inputs": [str(s) for s in one.inputs],
                         "outputs": [str(s) for s in one.outputs],
                         "communication": [str(s) for s in one.steps] + one.plain}
                        for one in operations
                        if one.module == (module or "")
                    ]  # fmt: skip
            return found

        modules = [
            {"name": name, "type": self._kinds[name], **entry(name)} for name in self._modules
        ]
        text = json.dumps({"name": "Global", **entry(None), "modules": modules}, indent=2)
        Path(file_name).write_text(text + "\n")

    def log_comm_debug_tracing_table_to_file(
        self, file_name: str = "comm_mode_log.txt", noise_level: int = 3
    ) -> None:
        """Write the table of `generate_comm_debug_tracing_table` to a file.

        Args:
            file_name: The file.
            noise_level: As there.
        """
        Path(file_name).write_text(self.generate_comm_debug_tracing_table(noise_level) + "\n")


# ---- drawing -------------------------------------------------------------------------------------


def visualize_sharding(dtensor: DTensor, header: str = "", use_rich: bool = False) -> None:
    """Print which rank has which rows and columns, on the first rank of the mesh.

    Args:
        dtensor: A DTensor of one or two dimensions; without elements, nothing is printed.
        header: A line to print first.
        use_rich: Draw boxes and colors with the package rich.

    Raises:
        PlacementError: The tensor does not have one or two dimensions.

    Cost:
        No communication.

    Example:
        ```python
        from dure.tensor import Shard, distribute_tensor, init_device_mesh
        from dure.tensor.debug import visualize_sharding

        mesh = init_device_mesh("cpu", (2,))
        visualize_sharding(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
        ```
    """
    spec, mesh = dtensor.spec, dtensor.device_mesh
    if dtensor.numel() == 0:
        return
    if dtensor.ndim not in (1, 2):
        raise PlacementError(
            "the tensor must have one or two dimensions", op="visualize_sharding", seen=f"{spec}"
        )
    if spec.coordinate is None or any(spec.coordinate):
        return
    owners: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    coordinates = itertools.product(*map(range, mesh.shape))
    for rank, coordinate in zip(mesh.mesh.flatten().tolist(), coordinates, strict=True):
        runs = [tuple(spec.runs(dim, coordinate)) for dim in range(dtensor.ndim)]
        if all(length for ((length, _), *_) in runs):
            owners[(*runs, ())[:2]].append(str(rank))
    rows, columns = (
        sorted({key[i] for key in owners}, key=lambda runs: [offset for _, offset in runs])
        for i in (0, 1)
    )
    head = ["", *(f"Col {_range(column)}" if column else "" for column in columns)]
    table = [
        [f"Row {_range(row)}"]
        + [f"{mesh.device_type}:{','.join(owners[row, column])}" for column in columns]
        for row in rows
    ]
    if header:
        print(header)
    if use_rich:
        _print_rich(head, table)
    else:
        print(in_columns([head, *table]))
    if spec.partial:
        print("(Partial: each rank has a term of the reduction)")


def _range(runs: Sequence[tuple[int, int]]) -> str:
    return ",".join(f"{offset}-{offset + length - 1}" for length, offset in runs)


def _print_rich(head: list[str], rows: list[list[str]]) -> None:
    from rich.console import Console  # lazy: an optional package
    from rich.table import Table  # lazy: an optional package

    colors = itertools.cycle(("blue", "green", "magenta", "cyan", "yellow", "red"))
    table = Table(show_lines=True)
    for column in head:
        table.add_column(column, justify="center" if column else "left")
    for name, *cells in rows:
        table.add_row(name, *(f"[on {next(colors)}] {text} [/]" for text in cells))
    Console().print(table)

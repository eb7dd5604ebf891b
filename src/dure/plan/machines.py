"""Machines: peak rates of GPUs, and the networks between them.

They are read from `data/machines.toml`, which names sources; custom files in the same form add to
it (docs/plan.md).
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any

from dure.errors import UsageError
from dure.trace.plain_files import read_plain

__all__ = ["Gpu", "Machine", "find_gpu", "gpus", "unknown"]

KINDS = ("v100", "a100", "h100", "b200", "cpu")
NETWORKS = ("infiniband", "ethernet", "efa")
_OP = "plan layouts"
_MOST_BYTES = 16 << 20  # of a file of machines


@dataclass(frozen=True)
class Gpu:
    """The peak rates of a device, from its data sheet or measured.

    Attributes:
        name: Name of the device.
        kind: The kind whose measured efficiencies are used: "v100", "a100", "h100", "b200", "cpu".
        bf16_tflops: Dense matrix products in bfloat16 (float32 for a CPU), in 10^12 FLOP/s.
        memory_gb: Size of the memory, in 10^9 bytes.
        memory_tb_s: Bandwidth of the memory, in 10^12 bytes/s.
        link_gb_s: Bandwidth to the other devices of a node in one direction, in 10^9 bytes/s.
        network_gb_s: Bandwidth to other nodes in one direction, in 10^9 bytes/s: the device's share
            of the node's network cards.
        network: The kind of network: "infiniband", "ethernet" or "efa".
        gpus_per_node: Usual number of devices per node.
        fp8_tflops: Dense matrix products in 8 bits, in 10^12 FLOP/s; 0 if unsupported.
        power: Power limit over the usual one of this kind.
        source: Source of the figures.

    Example:
        ```python
        from dure import plan

        gpu = plan.Gpu(
            name="mine", kind="a100", bf16_tflops=312, memory_gb=80, memory_tb_s=2.0,
            link_gb_s=300, network_gb_s=25,
        )
        ```
    """

    name: str
    kind: str
    bf16_tflops: float
    memory_gb: float
    memory_tb_s: float
    link_gb_s: float
    network_gb_s: float
    network: str = "infiniband"
    gpus_per_node: int = 8
    fp8_tflops: float = 0.0
    power: float = 1.0
    source: str = ""


@dataclass(frozen=True)
class Machine:
    """Nodes with equal GPUs.

    Attributes:
        gpu: The GPU.
        nodes: Number of nodes.
        gpus_per_node: Number of GPUs per node.
        measured: Measured constants of the cost model by name; they replace the fitted ones.

    Raises:
        UsageError: `nodes` or `gpus_per_node` is less than 1.

    Example:
        ```python
        machine = plan.Machine(plan.find_gpu("a100"), nodes=2)
        assert machine.ranks == 16
        ```
    """

    gpu: Gpu
    nodes: int = 1
    gpus_per_node: int = 8
    measured: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def ranks(self) -> int:
        """Number of GPUs."""
        return self.nodes * self.gpus_per_node

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.gpus_per_node < 1:
            raise UsageError(
                "nodes and gpus_per_node must be at least 1",
                op=_OP,
                seen=f"nodes={self.nodes}, gpus_per_node={self.gpus_per_node}",
            )

    def with_(self, **changes: float) -> Machine:
        """Return the machine with other GPUs.

        Args:
            **changes: New values of attributes of `Gpu`, such as ``memory_gb=160``.
        """
        return replace(self, gpu=replace(self.gpu, **changes))


def gpus(*paths: str | Path) -> dict[str, Gpu]:
    """Return GPUs by name: those of Dure's data file, and of some more files.

    Raises:
        UsageError: A file is missing or invalid, or a figure is out of range.
    """
    own = files("dure.plan") / "data" / "machines.toml"
    found = _read(own.read_text(), "data/machines.toml")
    for path in paths:
        try:
            found |= _read(read_plain(path, _MOST_BYTES).decode(), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"the file {path} cannot be read", op=_OP, seen=str(error)) from None
    return found


def find_gpu(name: str, *paths: str | Path) -> Gpu:
    """Return a GPU by its name.

    Args:
        name: The name, such as "h100".
        *paths: More files of GPUs (docs/plan.md).

    Returns:
        The GPU.

    Raises:
        UsageError: The name is unknown (the message lists similar ones), or a file is invalid.

    Example:
        ```python
        from dure import plan

        assert plan.find_gpu("h100").kind == "h100"
        ```
    """
    known = gpus(*paths)
    if name.lower() not in known:
        raise unknown(name, known, "GPU", "--machines FILE with its figures")
    return known[name.lower()]


def unknown(name: str, known: Iterable[str], what: str, instead: str) -> UsageError:
    """Return the error for an unknown name, with similar names."""
    near = get_close_matches(name.lower(), known, n=3, cutoff=0.4)
    return UsageError(
        f"no {what} is called {name!r} here",
        op=_OP,
        seen=f"near names: {', '.join(near)}" if near else "",
        fix=f"Use one of {', '.join(known)}; or {instead}.",
    )


def _read(text: str, where: str) -> dict[str, Gpu]:
    try:
        tables: dict[str, dict[str, Any]] = tomllib.loads(text).get("gpu", {})
        found = {name.lower(): Gpu(name=name, **table) for name, table in tables.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        deep = isinstance(error, RecursionError)
        raise UsageError(
            f"{where} does not describe GPUs",
            op=_OP,
            seen="nested too deeply" if deep else str(error),
            fix="The form is in docs/plan.md.",
        ) from None
    for gpu in found.values():
        _check(gpu, where)
    return found


def _check(gpu: Gpu, where: str) -> None:
    """Refuse figures that no machine has; usually the unit is wrong."""
    for what, value, names in (("kind", gpu.kind, KINDS), ("network", gpu.network, NETWORKS)):
        if value not in names:
            raise UsageError(
                f"{where}: {gpu.name} has an unknown {what}",
                op=_OP,
                seen=repr(value),
                fix=f"Take one of {', '.join(names)}.",
            )
    ranges = {
        "bf16_tflops": (0.01, 20_000, "10^12 FLOP/s"),
        "memory_gb": (0.5, 2_000, "10^9 bytes"),
        "memory_tb_s": (0.001, 50, "10^12 bytes/s: 3.35 for 3,350 GB/s"),
        "link_gb_s": (0.01, 5_000, "10^9 bytes/s in one direction"),
        "network_gb_s": (0.01, 1_000, "10^9 bytes/s for each GPU: 50 for 400 Gbit/s"),
    }
    for name, (least, most, unit) in ranges.items():
        value = getattr(gpu, name)
        if not isinstance(value, int | float) or not least <= value <= most:
            raise UsageError(
                f"{where}: {name} of {gpu.name} is out of range",
                op=_OP,
                seen=f"{value!r}; {least:g} to {most:g} are possible",
                fix=f"It is in {unit}.",
            )

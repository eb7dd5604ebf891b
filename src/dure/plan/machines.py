"""Machines: the best rates of a GPU, and the network between GPUs; data files with sources.

`data/machines.toml` holds them; a custom file in the same form adds to it (docs/plan.md).
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
from dure.trace.plain_files import nested_at, read_plain

__all__ = ["Gpu", "Machine", "find_gpu", "gpus", "unknown"]

KINDS = ("v100", "a100", "h100", "b200", "cpu")
NETWORKS = ("infiniband", "ethernet", "efa")
_OP = "plan layouts"
_MOST_BYTES = 16 << 20  # of a file of machines


@dataclass(frozen=True)
class Gpu:
    """What one device can do at best, from its data sheet or measured.

    Attributes:
        name: As it is asked for.
        kind: Whose measured efficiencies hold.
        bf16_tflops: Dense matrix products in bfloat16 (float32 for a CPU), 10^12 FLOP/s.
        memory_gb: Of its memory, in 10^9 bytes.
        memory_tb_s: Bandwidth of its memory, 10^12 bytes/s.
        link_gb_s: To the others of a node, one direction, 10^9 bytes/s for each.
        network_gb_s: To other nodes, its share of a node's network cards, one direction.
        network: The kind of network.
        gpus_per_node: Usual number.
        fp8_tflops: The same in 8 bits; 0: it has none.
        power: Its power limit over the usual one of its kind.
        source: Where the figures come from.
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
    """Some nodes of the same GPUs.

    Attributes:
        gpu: One of them.
        nodes: How many.
        gpus_per_node: In each.
        measured: Constants of the cost model that were measured here, by name (`Constants`);
            they replace the fitted ones.
    """

    gpu: Gpu
    nodes: int = 1
    gpus_per_node: int = 8
    measured: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def ranks(self) -> int:
        """GPUs altogether."""
        return self.nodes * self.gpus_per_node

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.gpus_per_node < 1:
            raise UsageError(
                "nodes and gpus_per_node must be at least 1",
                op=_OP,
                seen=f"nodes={self.nodes}, gpus_per_node={self.gpus_per_node}",
            )

    def with_(self, **changes: float) -> Machine:
        """Return the machine with other figures of its GPUs, such as ``memory_gb=160``."""
        return replace(self, gpu=replace(self.gpu, **changes))


def gpus(*paths: str | Path) -> dict[str, Gpu]:
    """Return the GPUs that are known by name: Dure's own, and those of some files.

    Raises:
        UsageError: A file that is missing, or not in the form above; figures of a wrong unit.
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

    Raises:
        UsageError: There is none; the error lists similar names.
    """
    known = gpus(*paths)
    if name.lower() not in known:
        raise unknown(name, known, "GPU", "--machines FILE with its figures")
    return known[name.lower()]


def unknown(name: str, known: Iterable[str], what: str, instead: str) -> UsageError:
    """Return the error that nothing has a name: near names, and what may be given instead."""
    near = get_close_matches(name.lower(), known, n=3, cutoff=0.4)
    return UsageError(
        f"no {what} is called {name!r} here",
        op=_OP,
        seen=f"near names: {', '.join(near)}" if near else "",
        fix=f"Take one of {', '.join(known)}; or {instead}.",
    )


def _read(text: str, where: str) -> dict[str, Gpu]:
    try:
        tables: dict[str, dict[str, Any]] = tomllib.loads(text).get("gpu", {})
        found = {name.lower(): Gpu(name=name, **table) for name, table in tables.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        line = text.count("\n", 0, nested_at(text)) + 1
        deep = isinstance(error, RecursionError)
        raise UsageError(
            f"{where} does not describe GPUs",
            op=_OP,
            seen=f"nested too deeply (at line {line})" if deep else str(error),
            fix="The form is in docs/plan.md.",
        ) from None
    for gpu in found.values():
        _check(gpu, where)
    return found


def _check(gpu: Gpu, where: str) -> None:
    """Refuse figures that no machine has: a wrong unit, most often."""
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

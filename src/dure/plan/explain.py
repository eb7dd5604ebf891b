"""Every term of a prediction, with its formula, its numbers and where its constants come from."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dure.plan.constants import Constants, described
from dure.plan.jobs import Job
from dure.plan.layouts import Layout
from dure.plan.machines import Machine
from dure.plan.planning import Row, costed

__all__ = ["Term", "explain"]


@dataclass(frozen=True)
class Term:
    """A part of a step's time, or of a rank's memory.

    Attributes:
        name: Of the part.
        value: Seconds, or bytes.
        unit: Which of the two.
        formula: How it is computed, with the names of the constants.
        constants: Each with its value, unit, meaning and source, as sentences.
    """

    name: str
    value: float
    unit: str
    formula: str
    constants: tuple[str, ...]


_BACKWARD = "forward once, backward twice"
_FORMULAS: dict[str, str] = {
    "products": "layers * microbatches * (3 + again * recompute) * sum of 2 m n k / (peak * gemm) "
    "* (1 + gemm_area / (m n)) over a layer's four products; narrower by power where a GPU's is "
    "limited, times fp8 in 8 bits",
    "attention": "layers * microbatches * (3.5 + again * recompute) * 2 tokens seq width / tp / "
    "(peak * flash)",
    "elementwise": f"tokens * features / tp * passes * 2 bytes / (0.85 * memory), {_BACKWARD}; and "
    "a microbatch's gradients added to the others'",
    "ends": "3 * product with the vocabulary + loss_passes * 4 bytes * tokens vocab / tp / "
    "(0.85 * memory); and what the slowest stage has more than the others",
    "launches": "(host^4 + device^4)^(1/4) - device for every layer, forward and backward "
    "(host_backward): what the host takes longer than the device",
    "tp": "layers * microbatches * (2 + again) * 2 all-reduces of tokens width 2 bytes over tp, as "
    "collectives: bytes * (l - 1) / l * 2 / (links * link) + link_latency * log2(l) * 2^(1/2)",
    "cp": "for each of cp - 1 steps: keys and values over the links beyond 0.7 of the attention, "
    "the output added once more, a message",
    "messages": "microbatches * 2 * (message + message_bytes * tokens width 2 bytes / tp / "
    "(network * net)) * parts",
    "bubble": "(sum of the stages - slowest) / parts; simulated for the rows that are shown",
    "dp": "gradients over dp and cp beyond overlap * backward; with FSDP the gathers of every "
    "layer beyond overlap_sharded * computing, and interference of them in any case; between "
    "nodes: bytes * (nodes - 1) / nodes / (network * ranks of a node * net) + net_latency * "
    "(nodes - 1)^net_growth",
    "optimizer": "adam * 30 bytes * parameters of a rank / (0.85 * memory)",
    "allocator": "microbatches * refill, where memory is fuller than room",
    "parameters": "parameters of the fullest stage / tp * bytes, over the ranks that share them",
    "gradients": "the same in float32",
    "gathered": "two layers and the ends in the precision of computing; all with zero2 or a "
    "pipeline",
    "activations": "layers of a stage * live microbatches * tokens * (6 width + 2 + 2 keys + heads "
    "+ kept * units of the MLP + 2 width) / tp * bytes; recomputed layers keep their input, "
    "width / tp",
    "scores": "scores_kept * tokens vocab / tp",
    "overhead": "context",
}
_MEMORY_OF_OPTIMIZER = "two moments and the float32 copy, 12 bytes, over the ranks that share them"


def explain(job: Job, machine: Machine, layout: Layout) -> tuple[Row, list[Term]]:
    """Return a layout's row, and each term of its time and memory.

    Raises:
        UsageError: The layout has not the machine's ranks.
    """
    row = costed(job, machine, layout)
    used = _values(machine)
    terms = [_term(name, seconds, "s", _FORMULAS[name], used) for name, seconds in row.time.items()]
    for name, size in row.memory.items():
        formula = _MEMORY_OF_OPTIMIZER if name == "optimizer" else _FORMULAS[name]
        terms.append(_term(name, size, "bytes", formula, used))
    return row, terms


def _values(machine: Machine) -> dict[str, str]:
    """Return a sentence for every constant, with the value that holds for the machine."""
    c = Constants.load().replaced(machine.measured)
    other = "a100" if machine.gpu.kind in ("h100", "b200") else "h100"
    found: dict[str, str] = {}
    for name, constant in described().items():
        if name.endswith(f"_{other}") and name != "host_h100":
            continue
        source = "measured here" if name in machine.measured else constant.source
        value = f"{getattr(c, name):.4g} {constant.unit}"
        found[name] = f"{name} = {value}: {constant.meaning} ({source})"
    return found


def _term(name: str, value: float, unit: str, formula: str, used: dict[str, str]) -> Term:
    words = set(re.findall(r"\w+", formula))
    families = {"gemm", "flash"} & words
    names = [each for each in used if each in words or each.partition("_")[0] in families]
    return Term(name, value, unit, formula, tuple(used[each] for each in names))

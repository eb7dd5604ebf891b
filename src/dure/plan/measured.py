"""A machine from measurements: pieces of a training step, and the constants that follow from them.

Measurements replace the fitted constants of the cost model, so that the same formulas give the
cost of a step on processors.
"""

from __future__ import annotations

import math

from dure.plan.machines import Gpu, Machine

__all__ = ["machine_of", "pieces"]

_LARGE, _SMALL = (1024, 1024, 1024), (128, 128, 1024)
TOKENS, WIDTH, HIDDEN, HEADS = 512, 512, 1408, 8  # of the layer that is timed
_VOCABULARY = 8192
_PARAMETERS = 1 << 23
_BYTES = 1 << 24  # of a large message
_FREED = 32 << 20  # bytes: half of the most freed memory that a rank keeps (docs/launch.md)
_OF = {"large": _LARGE, "small": _SMALL}


def pieces(ranks: int) -> dict[str, tuple[str, dict[str, int]]]:
    """Return what `ranks` ranks time: by name, a method of `here_rank.Pieces` and its arguments."""
    sizes = {"tokens": TOKENS, "width": WIDTH, "hidden": HIDDEN, "heads": HEADS}
    tiny = {"tokens": 2, "width": 64, "hidden": 64, "heads": 1}
    found: dict[str, tuple[str, dict[str, int]]] = {
        "tiny": ("layer", tiny),
        "tiny_forward": ("layer", tiny | {"backward": 0}),
        "small_update": ("adam", {"parameters": 8192}),  # so that libraries are loaded
        "held": ("held", {}),  # before anything large was freed
        "large": ("product", dict(zip("mnk", _LARGE, strict=True))),
        "small": ("product", dict(zip("mnk", _SMALL, strict=True))),
        "stream": ("stream", {"elements": 1 << 24}),
        "attention": ("attention", {"tokens": TOKENS, "width": WIDTH, "heads": HEADS}),
        "layer": ("layer", sizes),
        "loss": ("loss", {"tokens": TOKENS, "vocabulary": _VOCABULARY}),
        "adam": ("adam", {"parameters": _PARAMETERS}),
    }
    if ranks > 1:
        for name in ("all_reduce", "message"):
            found |= {f"{name}_{n}": (name, {"num_bytes": n}) for n in (8, _BYTES)}
    return found


def machine_of(seen: dict[str, float], ranks: int, memory: int, source: str) -> Machine:
    """Return a machine from what its ranks measured: peaks, and constants of the cost model.

    Args:
        seen: Seconds of the pieces, and bytes of a process.
        ranks: The number of ranks that measured.
        memory: Bytes of the machine.
        source: How it was measured.
    """
    per_flop = {name: seen[name] / (2 * math.prod(mnk)) for name, mnk in _OF.items()}
    sides = {name: sum(1 / side for side in mnk) for name, mnk in _OF.items()}
    slope = (per_flop["small"] - per_flop["large"]) / (sides["small"] - sides["large"])
    slope = max(slope, 0.0)
    peak = 1 / (per_flop["large"] - slope * sides["large"])
    hbm = 3 * 4 * (1 << 24) / seen["stream"]
    flops = 4 * TOKENS * TOKENS * WIDTH / 2
    products = [(TOKENS, 3 * WIDTH, WIDTH), (TOKENS, WIDTH, WIDTH)]
    products += [(TOKENS, 2 * HIDDEN, WIDTH), (TOKENS, WIDTH, HIDDEN)]
    product_s = sum(
        2 * (m * n * k / peak + (m * n + n * k + k * m) * slope) for m, n, k in products
    )
    rest = max(seen["layer"] - 3 * product_s - seen["attention"], 0.0)
    features = WIDTH + 2 * HIDDEN + 3 * WIDTH
    measured = {
        "gemm_a100": 1.0,
        "gemm_side": slope * peak,
        "flash_a100": 3.5 * flops / peak / seen["attention"],
        "passes": rest / 3 * hbm / (4 * TOKENS * features),
        "loss_passes": seen["loss"] * hbm / (4 * TOKENS * _VOCABULARY),
        "adam": seen["adam"] * hbm / (28 * _PARAMETERS),
        "recompute": 1.0,
        "host": seen["tiny_forward"],
        "host_backward": max(seen["tiny"] / seen["tiny_forward"] - 1, 0.1),
        "overlap": 0.0,  # what communicates takes the cores that would compute
        "interference": 1.0,
        "kept": 1.0,
        "gathered": 1.0,
        "context": seen["held"] + _FREED,
    }
    link = hbm
    if ranks > 1:
        large, small = seen[f"all_reduce_{_BYTES}"], seen["all_reduce_8"]
        link = 2 * _BYTES * (ranks - 1) / ranks / max(large - small, 1e-9)
        message = seen[f"message_{_BYTES}"] - seen["message_8"]
        measured |= {
            "link": 1.0,
            "link_latency": small / (math.log2(ranks) * 2),
            "message": seen["message_8"],
            "message_bytes": max(message, 0.0) * link / _BYTES,
        }
    gpu = Gpu(
        name="here",
        kind="cpu",
        bf16_tflops=peak / 1e12,
        memory_gb=memory / ranks / 1e9,
        memory_tb_s=hbm / 1e12,
        link_gb_s=link / 1e9,
        network_gb_s=link / 1e9,
        gpus_per_node=ranks,
        source=source,
    )
    return Machine(gpu, 1, ranks, measured)

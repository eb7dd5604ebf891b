"""The random generators of a rank: torch's, Python's, numpy's, and that of its accelerator.

Each rank has its own, so each rank's are saved. A rank that was there when the checkpoint was
saved continues with its own numbers: with as many ranks as before, the run is bitwise the
    undisturbed
one. A rank that was not there seeds all its generators with a number made of rank 0's saved state
and its own rank, so the same resume gives the same numbers again.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

__all__ = ["random_state", "restore_random_state", "seed_new_rank"]


def random_state() -> dict[str, Any]:
    """Return the state of this rank's generators, as bytes, numbers and tuples."""
    state: dict[str, Any] = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
    }
    kind, module = _accelerator()
    if module is not None and module.is_initialized():
        state[kind] = module.get_rng_state().numpy().tobytes()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Put back what `random_state` returned; an accelerator's only where there is one."""
    torch.set_rng_state(_tensor(state["torch"]))
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    kind, module = _accelerator()
    if module is not None and kind in state:
        module.set_rng_state(_tensor(state[kind]))


def _accelerator() -> tuple[str, Any]:
    """Return the type of this rank's accelerator, and torch's module for it; None without one."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return "", None
    module: Any = torch.get_device_module(device)  # Any: torch.cuda and modules like it
    has_generator = all(hasattr(module, n) for n in ("is_initialized", "get_rng_state"))
    return device.type, module if has_generator else None


def seed_new_rank(first: dict[str, Any], rank: int) -> None:
    """Seed the generators of a rank that was not there, from rank 0's saved state."""
    digest = hashlib.blake2b(first["torch"] + rank.to_bytes(8, "little"), digest_size=8).digest()
    seed = int.from_bytes(digest, "little")
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)

"""Layers of experts for tests, and batches."""

from __future__ import annotations

from typing import Any

import torch

from dure.nn.experts import MoE, MoEArgs
from tests.parallel.fsdp.ranks.fsdp_models import making

D, H = 6, 4
BALANCED: dict[str, Any] = {"aux_loss_coeff": 0.1, "z_loss_coeff": 0.01, "load_balance_coeff": 0.01}


def layer(seed: int = 0, **args: Any) -> MoE:
    chosen: dict[str, Any] = {"num_experts": 4, "top_k": 2} | args
    with making:
        torch.manual_seed(seed)
        return MoE(MoEArgs(**chosen), D, H).double()


def drawn(*shape: int, seed: int = 5) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

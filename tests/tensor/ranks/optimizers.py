"""Torch's optimizers in every form of their step."""

from __future__ import annotations

from typing import Any

import torch

FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
FORMS = [
    (name, form)
    for name in (*FUSED, "RMSprop", "Adadelta", "NAdam", "RAdam", "Adamax", "ASGD", "Rprop")
    for form in ("loop", "foreach", "fused")
    if form != "fused" or name in FUSED
]


def optimizer_of(name: str, form: str, parameters: list[Any]) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"fused": True} if form == "fused" else {"foreach": form == "foreach"}
    if name == "SGD":
        options |= {"momentum": 0.9, "weight_decay": 0.1}
    return getattr(torch.optim, name)(parameters, lr=0.1, **options)

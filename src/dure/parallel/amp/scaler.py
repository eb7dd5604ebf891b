"""A gradient scaler whose ranks decide together.

Half-precision gradients underflow, so the loss is multiplied by a *scale* before backward and the
gradients are divided by it before the optimizer's step. A scale that is too large overflows: the
step is then skipped and the scale backs off; after enough good steps it grows.

torch's scaler decides this on each rank for itself, from the gradients that this rank's optimizer
holds. That is enough as long as every rank holds the same gradients: where DDP averages all of
them, one rank's inf is in the average of every rank. It fails where gradients differ from rank to
rank:

* parameters that DDP leaves alone (ignored ones, or steps made under `no_sync`: local SGD),
* optimizers that hold a shard of the parameters, and models that are split over the ranks,
* a rank whose optimizer got no gradient at all: torch's scaler raises there, and the others wait.

The rank that saw the overflow then skips while the others step, and from there on the ranks' scales
differ, so that every later average adds gradients in different units. Nothing reports it.

The *agreement* here is one all_reduce (MAX) of twelve numbers for each optimizer's step:

    | found inf | scale | -scale | tracker | -tracker | ... growth, back-off, interval | used |

The first number is the decision. The others are free riders in the same message: where the largest
x is not minus the largest -x, the ranks' scalers differ (one of them loaded a checkpoint, say), and
all ranks raise before anything is stepped. The last one says whether a rank has scaled a loss: in a
pipeline only those of the last stage do; where none has, all raise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dure.comm.objects import all_gather_object
from dure.comm.ops import ReduceOp
from dure.comm.world import current_world, resolve
from dure.errors import Desync, UsageError
from dure.training.optimizers import rebind

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["GradScaler"]

_Tensors = dict[torch.device, torch.Tensor]


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler`, with one decision and one scale for all ranks.

    Use it as torch's: ``scaler.scale(loss).backward()``, optionally ``scaler.unscale_(optimizer)``
    and clipping, ``scaler.step(optimizer)``, ``scaler.update()``. Without a process group it is
    torch's.

    Collective:
        The first of `unscale_` and `step` for an optimizer; all ranks of the group, for their
        optimizers in the same order, whether or not a rank has gradients for it.

    Cost:
        One all_reduce of 96 bytes for each optimizer and step; none with one rank. On a GPU it is
        queued like any other; the host waits once a step, where torch's scaler does.

    Numerics:
        Scale, growth and back-off are torch's, bit by bit.

    Threads:
        One thread a rank.

    Args:
        device: Type of the device that losses are on; "cuda" where torch has it, else "cpu".
        init_scale: The first scale.
        growth_factor: The scale is multiplied by it after `growth_interval` good steps.
        backoff_factor: The scale is multiplied by it after a skipped step.
        growth_interval: How many good steps in a row make the scale grow.
        enabled: False makes `step` a plain step and everything else a no-op, on all ranks.
        process_group: The ranks that decide together; all by default, looked up at the first step.

    Raises:
        Desync: From `unscale_` or `step`, on all ranks: their scalers are not in the same state.
        UsageError: From `unscale_` or `step`: no rank has scaled a loss; or the optimizer steps
            inside backward, with gradients that are still scaled.

    Example:
        ```python
        model = dist.DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = dist.GradScaler(device="cpu")
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.ones(2, 4)).float().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # no rank steps if the gradients of one have overflowed
        scaler.update()
        ```
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: ProcessGroup | None = None,
    ) -> None:
        kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(kind, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self.process_group = process_group
        self._unverified: torch.Tensor | None = None
        self._has_scaled = False

    def scale(self, outputs: Any) -> Any:
        """Multiply tensors by the scale.

        Args:
            outputs: A tensor, or an iterable of tensors.

        Returns:
            The products, in the same form.

        In a pipeline the ranks of the last stage have a loss to scale, and the others none.
        """
        self._has_scaled = True
        return super().scale(outputs)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[torch.Tensor, torch.Tensor]:
        if self._scale is None and self._group() is not None:  # another rank may have scaled
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        return super()._check_scale_growth_tracker(funcname)

    def _group(self) -> ProcessGroup | None:
        """Return the ranks to agree with; None for a process on its own."""
        if self.process_group is None and current_world().default is None:
            return None
        group = resolve(self.process_group, "GradScaler")
        return group if group.size() > 1 else None

    # torch's scaler looks for infs in one place, for plain and for fused optimizers.
    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> _Tensors:
        """Unscale this rank's gradients; return whether any rank found an inf or a NaN in its own.

        Collective:
            All ranks of the group.
        """
        if getattr(optimizer, "overlap_with_ddp", False):
            raise UsageError(
                "gradients cannot be unscaled for an optimizer that steps inside backward",
                op="GradScaler.unscale_",
                seen=f"a {type(optimizer).__name__} with overlap_with_ddp=True",
                fix="Make it without overlap_with_ddp, or use bfloat16 and no scaler.",
            )
        rebind(optimizer)  # parameters that were replaced since have no gradients to unscale
        if _has_gradients_on_host(optimizer):
            # torch's copies to the host are not waited for, and the host would read them at once.
            inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
        found: _Tensors = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        group = self._group()
        if group is None:
            return found
        device = found_inf.device
        anywhere = found_inf.clone()
        for tensor in found.values():
            there = tensor.to(device, non_blocking=device.type != "cpu")
            anywhere = torch.maximum(anywhere, there)
        agreement = self._state_beside(anywhere)
        group.all_reduce(agreement, ReduceOp.MAX)
        if device.type == "cpu":
            self._verify(agreement)
        else:
            self._unverified = agreement  # reading it now would make the host wait
        return {device: agreement[0].float()}

    def _state_beside(self, found_inf: torch.Tensor) -> torch.Tensor:
        """Make this rank's part of the agreement; see the module's text."""
        scale, tracker = self._check_scale_growth_tracker("unscale_")
        device, wide = found_inf.device, torch.float64
        fixed = [self._growth_factor, self._backoff_factor, float(self._growth_interval)]
        moving = torch.stack([scale.to(device, wide), tracker.to(device, wide)])
        state = torch.cat([moving, torch.tensor(fixed, dtype=wide, device=device)])
        both_signs = torch.stack([state, -state], dim=1).reshape(-1)
        has_scaled = torch.tensor([float(self._has_scaled)], dtype=wide, device=device)
        return torch.cat([found_inf.to(wide).reshape(1), both_signs, has_scaled])

    def _verify(self, agreement: torch.Tensor) -> None:
        """Raise, on all ranks, if the ranks' scalers were not in one state, or unused."""
        self._unverified = None
        if not agreement[-1]:
            raise UsageError(
                "no rank has scaled a loss, so there is nothing to unscale",
                op="GradScaler.unscale_",
                fix="Call scaler.scale(loss).backward().",
            )
        largest, least = agreement[1:-1:2], -agreement[2:-1:2]
        if torch.equal(largest, least):
            return
        group = resolve(self.process_group, "GradScaler")
        states: list[Any] = [None] * group.size()  # Any: as all_gather_object fills it
        all_gather_object(states, self.state_dict(), group)
        calls = {
            rank: ", ".join(f"{k.lstrip('_')} {v:g}" for k, v in state.items())
            for rank, state in enumerate(states)
        }
        raise Desync(
            "the ranks' gradient scalers differ, so their gradients are in different units",
            calls=calls,
            op="GradScaler.unscale_",
            rank=group.rank(),
            world_size=group.size(),
            group=group.group_name,
            seen="; ".join(f"rank {rank} has {text}" for rank, text in calls.items()),
            fix="Make the scaler with the same arguments on all ranks, load its state_dict on all "
            "of them, and pass the same new_scale to update().",
        )

    def _maybe_opt_step(
        self,
        optimizer: torch.optim.Optimizer,
        optimizer_state: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> float | None:
        """Step unless an inf was found; the host waits for the answer here."""
        if self._unverified is not None:
            self._verify(self._unverified)
        return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Return what pickle keeps; the group is found again by the rank that loads."""
        if self.process_group is not None:
            raise UsageError(
                "only a scaler on the default process group can be copied or pickled",
                seen=f"this one is on the group {self.process_group.group_name!r}",
                fix="Save scaler.state_dict(), and load it into a new scaler.",
            )
        return super().__getstate__() | {"_unverified": None}


def _has_gradients_on_host(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a gradient is in the host's memory, as with `CPUOffloadPolicy`."""
    gradients = (p.grad for group in optimizer.param_groups for p in group["params"])
    return any(gradient is not None and gradient.device.type == "cpu" for gradient in gradients)

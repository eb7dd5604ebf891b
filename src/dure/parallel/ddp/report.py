"""What DDP can tell about itself, under the names of torch's DDP logging data.

Programs and tests read ``ddp._get_ddp_logging_data()``: how the module was wrapped, how its
gradients were bucketed, and, for sampled steps, when each phase began and ended in nanoseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from dure import env
from dure.errors import ModuleError
from dure.parallel.ddp.timing import Clock

if TYPE_CHECKING:
    from dure.parallel.ddp.reducer import Reducer

__all__ = ["Report"]

_ALWAYS_SAMPLED = 10
_DTYPE_NAMES = {torch.float32: "float", torch.float64: "double"}
_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES")


class Report:
    """Collects samples of steps, and the last error.

    Args:
        settings: What never changes: how the module was wrapped.
    """

    def __init__(self, settings: dict[str, object]) -> None:
        self.sample_rate = 100
        self._settings = settings
        self._error = ""
        self._samples: dict[str, object] = {"iteration": 0}
        self._sums = [0, 0, 0, 0]
        self._num_samples = 0

    def failed(self, what: str, *, seen: str = "", fix: str = "") -> ModuleError:
        """Make the error `what`, and keep it in the data."""
        error = ModuleError(what, seen=seen, fix=fix)
        self.keep(error)
        return error

    def keep(self, error: Exception) -> None:
        """Keep an error in the data; it is the last one that counts."""
        self._error = str(error)

    def sample(self, iteration: int, clock: Clock) -> None:
        """Take down the times of a finished step: the first ten, then one in `sample_rate`."""
        if iteration >= _ALWAYS_SAMPLED and iteration % self.sample_rate:
            return
        times = clock.times()
        spans = [
            max(1, clock.backward_start - clock.forward),
            max(1, clock.backward_end - clock.backward_start),
            max(1, clock.comm_end - clock.comm_start),
            int(times.overlap_s * 1e9),
        ]
        self._num_samples += 1
        self._sums = [total + span for total, span in zip(self._sums, spans, strict=True)]
        names = (
            "forward_compute_time",
            "backward_compute_time",
            "backward_comm_time",
            "backward_compute_comm_overlap_time",
        )
        self._samples = {
            "iteration": iteration,
            **dict(zip(names, spans, strict=True)),
            **{
                f"avg_{name}": total // self._num_samples
                for name, total in zip(names, self._sums, strict=True)
            },
            "forward_compute_time_start": clock.forward,
            "backward_compute_time_start": clock.backward_start,
            "backward_compute_time_end": clock.backward_end,
            "backward_comm_time_start": clock.comm_start,
            "backward_comm_time_end": clock.comm_end,
        }

    def data(self, reducer: Reducer) -> dict[str, object]:
        """Return all of it."""
        return {
            **self._settings,
            **_environment(),
            **_bucketing(reducer),
            **self._samples,
            "has_error": int(bool(self._error)),
            "error": self._error,
        }


def _environment() -> dict[str, object]:
    return {name.lower(): env.text(name, "N/A") for name in _VARIABLES}


def _bucketing(reducer: Reducer) -> dict[str, object]:
    """Describe the buckets; parameters are numbered in the order of registration."""
    sizes, dtypes = zip(*reducer.arrangement.parameter_kinds(), strict=True)
    data: dict[str, object] = {
        "world_size": reducer.group.size(),
        "rank": reducer.group.rank(),
        "backend_name": reducer.group.backend_name,
        "num_parameter_tensors": len(sizes),
        "total_parameter_size_bytes": sum(sizes),
        "dtypes": ", ".join(sorted({_DTYPE_NAMES.get(d, str(d)[6:]) for d in dtypes})),
        "bucket_sizes": _listed(reducer.first_sizes),
        "find_unused_parameters": int(reducer.allow_unused),
        "has_rebuilt_buckets": int(reducer.rebuilt),
    }
    if reducer.reductions.hook is not None or reducer.num_reduced:
        data["comm_hook"] = reducer.hook_name
    if reducer.num_reduced:
        data["can_set_static_graph"] = int(reducer._ddp_graph_static())  # pyright: ignore
        data["num_buckets_reduced"] = sum(1 for bucket in reducer.buckets if bucket.slots)
        data["prev_iteration_grad_ready_order_indices"] = _listed(reducer.ready_order)
    if reducer.rebuilt:
        data["rebuilt_bucket_sizes"] = _listed(reducer.arrangement.bucket_sizes())
        data["rebuilt_per_bucket_param_indices"] = ", ".join(
            " ".join(str(slot.number) for slot in bucket.slots) for bucket in reducer.buckets
        )
    return data


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))

"""torch's path `torch.distributed.pipelining.microbatch`."""

from __future__ import annotations

from dure.parallel.pipeline.microbatch import (
    TensorChunkSpec,
    merge_chunks,
    split_args_kwargs_into_chunks,
)

__all__ = ["TensorChunkSpec", "merge_chunks", "split_args_kwargs_into_chunks"]

"""Keeping the C library from giving memory back to the system at every step.

A training step allocates activations and gradients, and frees them all. glibc gives memory at the
top of its heap back as soon as more than a *trim threshold* is free there, and gets it again in the
next step, when the kernel has to map and clear each page anew: about a microsecond for every
4 KiB. Whether that happens depends on what chance put on top of the heap; where ranks wait for
each other at each step, the unluckiest rank decides for all.

glibc adapts its thresholds by itself: when a block that was too large for the heap is freed, blocks
of that size come from the heap in future, and twice that size is left on top of it. So one large
block, allocated and freed without ever being touched, is enough to say what the largest blocks of
a training step would say sooner or later. Where the user has chosen thresholds
(MALLOC_TRIM_THRESHOLD_, mallopt) or another allocator, this does nothing.
"""

from __future__ import annotations

import torch

__all__ = ["keep_freed_memory"]

# The largest block that glibc adapts to is one of 32 MiB, with its header and rounded to pages.
_LARGEST_BYTES = (32 << 20) - (64 << 10)


def keep_freed_memory() -> None:
    """Have the C library leave up to 64 MiB of freed memory on top of its heap.

    Cost: two system calls; no memory is touched.
    """
    torch.empty(_LARGEST_BYTES, dtype=torch.uint8)

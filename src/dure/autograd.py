"""torch's path `torch.distributed.autograd`: gradients of graphs over several processes."""

from __future__ import annotations

from dure.rpc.autograd.api import (
    DistAutogradContext,
    _current_context,  # pyright: ignore[reportPrivateUsage, reportUnusedImport]  # noqa: F401
    _get_debug_info,  # pyright: ignore[reportPrivateUsage, reportUnusedImport]  # noqa: F401
    _get_max_id,  # pyright: ignore[reportPrivateUsage, reportUnusedImport]  # noqa: F401
    _is_valid_context,  # pyright: ignore[reportPrivateUsage, reportUnusedImport]  # noqa: F401
    _new_context,  # pyright: ignore[reportPrivateUsage, reportUnusedImport]  # noqa: F401
    _release_context,  # pyright: ignore[reportPrivateUsage, reportUnusedImport]  # noqa: F401
    _retrieve_context,  # pyright: ignore[reportPrivateUsage, reportUnusedImport]  # noqa: F401
    backward,
    context,
    get_gradients,
    is_available,
)

__all__ = ["DistAutogradContext", "backward", "context", "get_gradients", "is_available"]

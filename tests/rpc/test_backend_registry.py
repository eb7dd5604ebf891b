"""Options of `init_rpc`."""

from __future__ import annotations

from typing import Any

import pytest

from dure import rpc
from dure.errors import UsageError


@pytest.mark.parametrize(
    "options",
    [
        {"init_method": 5},
        {"num_worker_threads": 1.5},
        {"num_worker_threads": "3"},
        {"num_worker_threads": 0},
        {"num_worker_threads": True},
        {"rpc_timeout": float("nan")},
    ],
)
def test_options_of_the_wrong_kind_are_refused_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        rpc.TensorPipeRpcBackendOptions(**options)
    assert caught.value.fix

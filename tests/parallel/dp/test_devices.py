"""Devices that a batch can be split over."""

from typing import Any

import pytest
from torch import nn

from dure.errors import ModuleError
from tests.parallel.dp.wrapped import parallel


@pytest.mark.parametrize("device_ids", [[], 0, ["cuda:0"], ["meta", "meta"]])
def test_devices_that_do_not_fit_are_refused(device_ids: Any) -> None:
    with pytest.raises(ModuleError):
        parallel(nn.Linear(1, 1), device_ids)

"""Models by their configuration: which are not planned for."""

from __future__ import annotations

import json

import pytest

from dure.errors import UsageError
from dure.plan import Job, configured_model


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"num_local_experts": 8}, "mixtures of experts"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantized weights"),
        ({"num_hidden_layers": None}, "does not say layers"),
        ({"num_attention_heads": 7}, "do not divide the width"),
        ({"hidden_size": 16}, "no model has width 16"),
    ],
)
def test_configurations_that_are_not_planned_for(config, said, tmp_path):
    usual = {"hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(usual | {"vocab_size": 1000} | config))
    with pytest.raises(UsageError, match=said):
        Job(configured_model(path), 2**20)

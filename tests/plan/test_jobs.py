"""Models by their configuration: which are not planned for, and what is not a configuration."""

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
        ({"hidden_size": "abc"}, "hidden_size of .* must be an integer"),
        ({"hidden_size": 1e300}, "hidden_size of .* must be an integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers of .* must be an integer"),
        ({"vocab_size": 1000.5}, "vocab_size of .* must be an integer"),
        ({"intermediate_size": 10**400}, "no model has hidden"),
        ({"text_config": "abc"}, "text_config of .* must be a JSON object"),
    ],
)
def test_configurations_that_are_not_planned_for(config, said, tmp_path):
    usual = {"hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(usual | {"vocab_size": 1000} | config))
    with pytest.raises(UsageError, match=said):
        Job(configured_model(path), 2**20)


def test_whole_numbers_are_read_in_every_spelling(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(
        '{"hidden_size": 1024.0, "n_layer": "8", "num_attention_heads": "16.0", "vocab_size": 1e3}'
    )
    model = configured_model(path)
    assert (model.width, model.layers, model.vocabulary) == (1024, 8, 1000)

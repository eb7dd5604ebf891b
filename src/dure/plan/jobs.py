"""The training job: a model by name, Hugging Face configuration or sizes, and its batch."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from math import log2
from pathlib import Path
from typing import Any, cast

from dure.errors import UsageError
from dure.plan.constants import document
from dure.plan.machines import unknown
from dure.plan.memory import Model
from dure.trace.plain_files import parse_json, read_plain

__all__ = ["PRECISIONS", "Job", "configured_model", "find_model", "models"]

_OP = "plan layouts"

PRECISIONS = ("bf16", "fp8", "fp32")
"""Precisions of matrix products; bf16 and fp8 have parameters in bfloat16 and a float32 copy."""

_NAMES = {  # of `Model`'s sizes in config.json, in the families that there are
    "vocabulary": ("vocab_size",),
    "width": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "groups": ("num_key_value_heads", "num_kv_heads"),
    "hidden": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "length": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size")
_EXPERTS_IN_NAMES = ("moe", "mixtral", "deepseek", "8x7b", "8x22b")
_LONGEST_BY_DEFAULT = 8192
_MOST_BYTES = 16 << 20  # of a configuration
_LONGEST_SHOWN = 60


@dataclass(frozen=True)
class Job:
    """A model with its batch.

    Attributes:
        model: Sizes of the model; `Model.length` is the length of sequences.
        batch_tokens: Tokens of a step over all ranks; a multiple of the length.
        precision: Precision of matrix products: "bf16", "fp8" or "fp32".
        compiled: Whether layers are compiled, so that elementwise operators are fused.

    Raises:
        UsageError: Sizes that do not match, an unsupported precision, or an invalid batch.

    Example:
        ```python
        from dure import plan

        job = plan.Job(plan.find_model("gpt2"), batch_tokens=2**19)
        assert job.flops > 0
        ```
    """

    model: Model
    batch_tokens: int
    precision: str = "bf16"
    compiled: bool = False

    def __post_init__(self) -> None:
        _check_model(self.model)
        if self.precision not in PRECISIONS:
            four_bits = "4" in self.precision
            raise UsageError(
                f"{'4-bit formats are' if four_bits else 'this precision is'} not planned for",
                op=_OP,
                seen=repr(self.precision),
                fix=f"Take one of {', '.join(PRECISIONS)}.",
            )
        self._check_batch()

    @property
    def sequences(self) -> int:
        """Number of sequences of a step."""
        return self.batch_tokens // self.model.length

    @property
    def flops(self) -> float:
        """FLOPs of a step, with full (not causal) attention and without recomputation."""
        model = self.model
        products = model.layers * model.layer_parameters + model.vocabulary * model.width
        attention = 12 * model.layers * model.length * model.width
        return float(self.batch_tokens) * (6 * products + attention)

    def _check_batch(self) -> None:
        tokens, length = self.batch_tokens, self.model.length
        if tokens < length:
            in_units = [f"{tokens * unit:,}" for unit in (10**3, 2**10, 10**6, 2**20)]
            raise UsageError(
                f"a batch of {tokens:,} tokens is less than one sequence of {length:,}",
                op=_OP,
                seen=f"in thousands or millions it would be {', '.join(in_units)}",
                fix="--batch-tokens counts tokens of a step over all ranks: 4M is 4,000,000.",
            )
        if tokens % length:
            power = 1 << round(log2(tokens / length))
            raise UsageError(
                "a batch must consist of complete sequences",
                op=_OP,
                seen=f"{tokens:,} tokens, sequences of {length:,}",
                fix=f"Take --batch-tokens {power * length} ({power} sequences), or "
                f"{tokens // length * length}; 4M is 4,000,000 and 4Mi is 4,194,304.",
            )
        if tokens > 10**9:
            raise UsageError(
                "a batch of more than 10^9 tokens is no batch",
                op=_OP,
                seen=f"{tokens:,}",
                fix="--batch-tokens counts the tokens of one step, not of the training.",
            )


@cache
def models() -> dict[str, Model]:
    """Return the models that are known by name."""
    return {name: Model(**sizes) for name, sizes in document("models").items()}


def find_model(name: str) -> Model:
    """Return a model by its name.

    Args:
        name: The name, such as "llama3-8b".

    Returns:
        The sizes of the model.

    Raises:
        UsageError: The name is unknown (the message lists similar ones), or of a mixture of
            experts.

    Example:
        ```python
        from dure import plan

        assert plan.find_model("llama3-8b").layers == 32
        ```
    """
    if any(word in name.lower() for word in _EXPERTS_IN_NAMES):
        raise UsageError("mixtures of experts are not planned for", op=_OP, seen=repr(name))
    plain = name.lower().replace("_", "-")
    if plain not in models():
        raise unknown(name, models(), "model", "--config config.json; or its sizes")
    return models()[plain]


def configured_model(path: str | Path) -> Model:
    """Read a model's sizes from a Hugging Face ``config.json``.

    Args:
        path: The file.

    Returns:
        The sizes of the model, with sequences of at most 8,192 tokens.

    Raises:
        UsageError: The file cannot be read or has no sizes, or the model has experts or quantized
            weights.

    Example:
        ```python
        import json
        from dure import plan

        sizes = {"vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32}
        sizes |= {"num_attention_heads": 32, "intermediate_size": 11008}
        path = Path(f"config{dist.get_rank()}.json")  # usually the one of a model of Hugging Face
        path.write_text(json.dumps(sizes | {"model_type": "llama"}))
        model = plan.configured_model(path)
        assert (model.layers, model.width) == (32, 4096)
        ```
    """
    try:
        found = parse_json(read_plain(path, _MOST_BYTES))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read", op=_OP, seen=str(error)) from None
    config = _object(
        _object(found, f"{path}").get("text_config") or found, f"text_config of {path}"
    )
    if any(config.get(name) for name in _EXPERTS):
        raise UsageError(
            "mixtures of experts are not planned for",
            op=_OP,
            seen=", ".join(f"{name}={config[name]}" for name in _EXPERTS if config.get(name)),
            fix="dure.plan.memory counts their memory; docs/experts.md has what they cost.",
        )
    quantized = _object(config.get("quantization_config") or {}, f"quantization_config of {path}")
    if quantized:
        method = quantized.get("quant_method", "quantized")
        raise UsageError("quantized weights are not trained", op=_OP, seen=f"{path}: {method}")
    sizes: dict[str, int] = {}
    for size, names in _NAMES.items():
        name = next((name for name in names if config.get(name)), None)
        if name is not None:
            sizes[size] = _whole_number(config[name], f"{name} of {path}")
    missing = [s for s in ("vocabulary", "width", "layers", "heads") if s not in sizes]
    if missing:
        raise UsageError(
            f"{path} does not say {', '.join(missing)}",
            op=_OP,
            seen=f"it has {', '.join(sorted(config)[:12]) or 'nothing'}",
            fix="Write them yourself: --model layers=32,width=4096,heads=32,vocabulary=128256.",
        )
    gated = int(str(config.get("hidden_act", config.get("activation_function", ""))) == "silu")
    usual = {
        "groups": sizes["heads"],
        "hidden": 4 * sizes["width"],
        "length": _LONGEST_BY_DEFAULT,
        "gated": gated,
        "tied": int(bool(config.get("tie_word_embeddings", False))),
    }
    model = Model(**(usual | sizes))
    return replace(model, length=min(model.length, _LONGEST_BY_DEFAULT))


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{what} must be a JSON object", op=_OP, seen=_shown(value))
    return cast(dict[str, Any], value)


def _whole_number(value: Any, what: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    text = str(value).removesuffix(".0") if isinstance(value, str | float) else ""
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise UsageError(f"{what} must be an integer", op=_OP, seen=_shown(value))
    return int(text)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _check_model(model: Model) -> None:
    """Refuse sizes that do not match each other, and numbers that no model has."""
    if model.experts:
        raise UsageError("mixtures of experts are not planned for", op=_OP)
    ranges = {
        "layers": (1, 1000),
        "width": (32, 200_000),
        "heads": (1, 200_000),
        "groups": (1, 200_000),
        "hidden": (1, 2_000_000),
        "vocabulary": (2, 2_000_000),
        "length": (2, 4_000_000),
    }
    for size, (least, most) in ranges.items():
        value = getattr(model, size)
        if not least <= value <= most:
            raise UsageError(
                f"no model has {size} {value:,}",
                op=_OP,
                seen=f"{least:,} to {most:,} are possible",
                fix="Write layers=32,width=4096 and so on, not thousands.",
            )
    if model.width % model.heads or model.heads % model.groups:
        raise UsageError(
            "the heads do not divide the width, or their groups the heads",
            op=_OP,
            seen=f"width {model.width}, {model.heads} heads, {model.groups} of keys and values",
        )

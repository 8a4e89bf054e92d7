"""The decoder-layer part of a config.json -> LayersConfig, for targets and drafts alike."""

from __future__ import annotations

from typing import Any

from convert.rope import read_rope
from convert.settings import (
    COUNT,
    DEPTH,
    FLAG,
    POSITIVE,
    SIZE,
    WORD,
    WORDS,
    ConfigReading,
)
from dspark_jax.config import LayersConfig

# Model types whose decoder layer is implemented. Their differences: q/k norms (Qwen3), a bias on
# q, k, v alone (Qwen2), a bias on all four or none by `attention_bias` (Qwen3, Llama), none and a
# window on every layer (Mistral).
MODEL_TYPES = ("qwen3", "qwen2", "llama", "mistral")

# What transformers' configuration classes fill in for absent keys; used in full only for files
# that hold just the difference from their class.
CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_window_layers": 28,
    },
    "qwen2": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_window_layers": 28,
    },
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    },
    "mistral": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
    },
}


def read_layers(reading: ConfigReading, model_type: str, qk_norm: bool) -> LayersConfig | None:
    """Resolve the stack of decoder layers; None after a problem.

    Sizes are held against the tensors later; `qk_norm` is what the tensors say.
    """
    before = len(reading.problems)
    sizes = {
        name: reading.require(name, SIZE)
        for name in ("hidden_size", "intermediate_size", "num_attention_heads")
    }
    depth = reading.require("num_hidden_layers", DEPTH)
    eps = reading.require("rms_norm_eps", POSITIVE)
    rope = read_rope(reading)
    activation = reading.layer("hidden_act", WORD, "silu")
    if activation not in ("silu", None):
        reading.problem(f"hidden_act is {activation}: only silu is supported")
    _hold_qk_norm(reading, qk_norm)
    qkv_bias, output_bias = _biases(reading, model_type)
    windows = _windows(reading, model_type, depth) if depth else ()
    if len(reading.problems) > before or rope is None:
        return None
    heads = sizes["num_attention_heads"]
    try:
        return LayersConfig(
            hidden_size=sizes["hidden_size"],
            intermediate_size=sizes["intermediate_size"],
            num_layers=depth,
            num_heads=heads,
            num_kv_heads=reading.layer("num_key_value_heads", SIZE, heads) or heads,
            head_dim=_head_dim(reading, model_type, sizes["hidden_size"], heads),
            rope=rope,
            norm_eps=float(eps),
            qk_norm=qk_norm,
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            windows=windows,
        )
    except ValueError as error:
        reading.problem(str(error))
        return None


def _hold_qk_norm(reading: ConfigReading, there: bool) -> None:
    places = {"", reading.section, "dflash_config", "dspark_config"}
    paths = [f"{place}.use_qk_norm" if place else "use_qk_norm" for place in sorted(places)]
    named = reading.find("use_qk_norm", FLAG, *paths)
    if named is not None and named is not there:
        reading.problem(
            f"use_qk_norm is {named}, but the tensor layers.0.self_attn.q_norm.weight"
            f" {'is there' if there else 'is not part of this model'}"
        )


def _head_dim(reading: ConfigReading, model_type: str, hidden: int, heads: int) -> int:
    absent = CLASS_DEFAULTS[model_type].get("head_dim", hidden // heads)
    return reading.layer("head_dim", SIZE, absent) or 0


def _biases(reading: ConfigReading, model_type: str) -> tuple[bool, bool]:
    """Return whether q, k, v and whether the output projection carry a bias."""
    if model_type == "qwen2":
        return True, False
    if model_type == "mistral":
        return False, False
    bias = bool(reading.layer("attention_bias", FLAG, False))
    return bias, bias


def _windows(reading: ConfigReading, model_type: str, depth: int) -> tuple[int, ...]:
    """Rows a query of each layer sees, itself included, as transformers counts; 0 is all."""
    if model_type == "llama":  # the class knows no window
        return (0,) * depth
    if model_type == "mistral":
        return _mistral_windows(reading, depth)
    used = reading.layer("use_sliding_window", FLAG)
    window = reading.layer("sliding_window", COUNT) or 0
    types = reading.layer("layer_types", WORDS)
    if types is None:
        first = reading.layer("max_window_layers", COUNT, 28) if used and window else depth
        return tuple(window if layer >= first else 0 for layer in range(depth))
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown or len(types) != depth:
        what = f"names {unknown[0]}" if unknown else f"has {len(types)} entries for {depth} layers"
        reading.problem(
            f"{reading.path('layer_types')} {what}; it must name full_attention or"
            " sliding_attention for each layer"
        )
        return ()
    if "sliding_attention" in types and (used is False or not window):
        reading.problem(
            f"{reading.path('layer_types')} names sliding_attention, but sliding_window is"
            f" {window or 'absent'} and use_sliding_window is {used}"
        )
        return ()
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def _mistral_windows(reading: ConfigReading, depth: int) -> tuple[int, ...]:
    # An explicit null means no window; an absent key means the window of the class.
    if "sliding_window" in reading.tree and reading.tree["sliding_window"] is None:
        window = 0
    else:
        absent = CLASS_DEFAULTS["mistral"]["sliding_window"]
        window = reading.layer("sliding_window", COUNT, absent) or 0
    types = set(reading.layer("layer_types", WORDS) or ())
    expected = "sliding_attention" if window else "full_attention"
    if types - {expected}:
        reading.problem(f"layer_types of a Mistral model must all be {expected} here")
    return (window,) * depth

"""Decoder-layer settings against transformers: class defaults, RoPE, sliding windows."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from convert.decoder import CLASS_DEFAULTS, read_layers
from convert.rope import read_rope
from convert.settings import ConfigReading
from dspark_jax.config import LayersConfig, RopeConfig
from tests.tiny_pair import TinyPair

CLASSES = {
    "qwen3": Qwen3Config,
    "qwen2": Qwen2Config,
    "llama": LlamaConfig,
    "mistral": MistralConfig,
}


@pytest.mark.parametrize("model_type", list(CLASSES))
def test_class_defaults_are_those_of_transformers(model_type: str) -> None:
    made = CLASSES[model_type]()
    for name, value in CLASS_DEFAULTS[model_type].items():
        if name == "rope_theta":
            assert made.rope_parameters["rope_theta"] == value
        else:
            assert getattr(made, name) == value, name
    assert made.tie_word_embeddings is False
    assert made.hidden_act == "silu"
    assert getattr(made, "attention_bias", False) is False


def read(tree: dict[str, Any], model_type: str = "qwen3") -> tuple[LayersConfig | None, list[str]]:
    reading = ConfigReading(tree, [])
    return read_layers(reading, model_type, qk_norm=model_type == "qwen3"), reading.problems


def tiny(**changes: Any) -> dict[str, Any]:
    return TinyPair().layer_tree(4) | changes


def rope(tree: dict[str, Any]) -> RopeConfig:
    reading = ConfigReading(tree, [])
    made = read_rope(reading)
    assert made is not None, reading.problems
    return made


def test_default_rope_in_both_spellings() -> None:
    new = rope({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}})
    assert new == rope({"rope_theta": 5e5, "rope_scaling": None}) == RopeConfig(theta=5e5)
    nested = {"rope_theta": 5e5, "rope_type": "default"}
    both = {"full_attention": nested, "sliding_attention": dict(nested)}
    assert rope({"rope_parameters": both}) == new


YARN = [
    {"factor": 4.0, "original_max_position_embeddings": 128},
    {"factor": 4.0},
    {"factor": 0.5, "original_max_position_embeddings": 128},
    {"factor": 4.0, "attention_factor": 0.7},
    {"factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.8},
    {"factor": 4.0, "mscale": 1.0},
    {"factor": 4.0, "beta_fast": 16, "beta_slow": 2, "truncate": False},
]


@pytest.mark.parametrize("keys", YARN)
def test_yarn_attention_factor_is_that_of_transformers(keys: dict[str, Any]) -> None:
    parameters = {"rope_type": "yarn", "rope_theta": 1e4, **keys}
    tree = tiny(max_position_embeddings=512, rope_parameters=dict(parameters))
    _, expected = ROPE_INIT_FUNCTIONS["yarn"](
        Qwen3Config(**{k: v for k, v in tree.items() if k != "model_type"})
    )
    made = rope(tree)
    assert made.attention_factor == expected
    assert made.original_max_position == keys.get("original_max_position_embeddings", 512)
    assert (made.beta_fast, made.beta_slow) == (keys.get("beta_fast", 32), keys.get("beta_slow", 1))
    assert made.truncate is keys.get("truncate", True)
    flat = tiny(max_position_embeddings=512, rope_theta=1e4, rope_scaling={"type": "yarn", **keys})
    flat.pop("rope_parameters")
    assert rope(flat) == made


def test_yarn_without_a_factor_takes_the_ratio_of_lengths() -> None:
    scaling = {"type": "yarn", "factor": None, "original_max_position_embeddings": 128}
    tree = {"max_position_embeddings": 512, "rope_theta": 1e4, "rope_scaling": scaling}
    assert rope(tree).factor == 4.0


def test_llama3_and_linear_rope() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    made = rope({"rope_theta": 5e5, "rope_scaling": scaling})
    assert made == RopeConfig(
        kind="llama3",
        theta=5e5,
        factor=8.0,
        original_max_position=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    linear = rope({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert linear == RopeConfig(kind="linear", theta=5e5, factor=2.0)


REFUSED_ROPE = [
    ({}, "rope_theta is missing"),
    ({"rope_theta": 0}, "rope_theta must be a positive number, got 0"),
    ({"rope_theta": "1e6"}, "rope_theta must be a positive number"),
    ({"rope_theta": 10**400}, "rope_theta must be a positive number"),
    ({"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic is not"),
    ({"rope_theta": 1e4, "rope_scaling": {"type": ["yarn"]}}, "is not supported"),
    ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "longrope"}}, "longrope is not"),
    ({"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "rope_type": "linear"}}, "not supported"),
    ({"rope_theta": 1e4, "rope_scaling": {"type": "linear"}}, "linear needs factor"),
    ({"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 4}}, "yarn needs original_max"),
    ({"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 0}}, "factor must be a pos"),
    ({"rope_theta": 1e4, "rope_scaling": 4}, "rope_scaling must be an object"),
    (
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "partial rotary layers are not supported",
    ),
    ({"rope_parameters": {"rope_theta": 1e4, "mrope_section": [2, 1, 1]}}, "mrope_section"),
    (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "other": {"rope_theta": 2.0}}},
        "differ between layer types",
    ),
    (
        {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"type": "linear", "factor": 2}},
        "are both there and differ",
    ),
    (
        {
            "rope_theta": 1e4,
            "max_position_embeddings": 64,
            "rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4},
        },
        "llama3 needs low_freq_factor below high_freq_factor",
    ),
]


@pytest.mark.parametrize(("tree", "words"), REFUSED_ROPE)
def test_rope_that_is_not_understood_is_refused(tree: dict[str, Any], words: str) -> None:
    reading = ConfigReading(tree, [])
    assert read_rope(reading) is None
    assert any(words in problem for problem in reading.problems), reading.problems


WINDOWS = [
    ("qwen3", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2}),
    ("qwen3", {"use_sliding_window": False, "sliding_window": 3, "max_window_layers": 2}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 3,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
    ),
    ("mistral", {"sliding_window": 3}),
    ("mistral", {"sliding_window": None}),
]


@pytest.mark.parametrize(("model_type", "keys"), WINDOWS)
def test_windows_see_the_rows_that_transformers_shows(
    model_type: str, keys: dict[str, Any]
) -> None:
    import torch

    tree = tiny(layer_types=None) | keys
    layers, problems = read(tree, model_type)
    assert layers is not None, problems
    tree = {k: v for k, v in tree.items() if k != "model_type" and v is not None}
    config = AutoConfig.for_model(model_type, **tree, attn_implementation="eager")
    if model_type == "mistral":
        config.sliding_window = keys["sliding_window"]
    embeds = torch.zeros(1, 6, 4)
    for index, window in enumerate(layers.windows):
        kind = getattr(config, "layer_types", None)
        slides = kind[index] == "sliding_attention" if kind else config.sliding_window is not None
        make = create_sliding_window_causal_mask if slides else create_causal_mask
        mask = make(
            config=config, inputs_embeds=embeds, attention_mask=None, cache=None, position_ids=None
        )
        seen = 6 if mask is None else int((mask[0, 0, -1] == 0).sum())
        assert seen == (window or 6)


def test_contradictory_windows_are_refused() -> None:
    types = ["sliding_attention"] * 4
    for keys in (
        {"layer_types": types, "sliding_window": 8, "use_sliding_window": False},
        {"layer_types": types, "sliding_window": None, "use_sliding_window": True},
        {"layer_types": ["linear_attention"] * 4},
        {"layer_types": ["full_attention"] * 3},
    ):
        layers, problems = read(tiny(**keys))
        assert layers is None
        assert "layer_types" in problems[0]


def test_head_width_may_differ_from_hidden_over_heads() -> None:
    layers, _ = read(tiny(head_dim=16))
    assert layers is not None
    assert layers.head_dim == 16
    tree = tiny()
    tree.pop("head_dim")
    layers, _ = read(tree, "llama")
    assert layers is not None
    assert layers.head_dim == 8

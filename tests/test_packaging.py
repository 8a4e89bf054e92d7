"""Every packaging resolves to the same settings and the same parameters."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from convert import CheckpointError
from convert.apply import load_draft_params
from convert.draft_settings import spaced_taps
from convert.packaging import (
    DraftOverrides,
    DraftSource,
    read_draft,
    read_target,
    share_with_target,
)
from tests.checkpoints import save_json, save_tensors, write_draft, write_target
from tests.dialects import DIALECTS, speculators, z_lab
from tests.tiny_pair import TinyPair


def read_pair(
    folder: Path,
    pair: TinyPair,
    dialect: str,
    overrides: DraftOverrides | None = None,
    **changes: Any,
) -> DraftSource:
    target = read_target(write_target(folder / "target", pair))
    draft = read_draft(write_draft(folder / dialect, pair, dialect, **changes), target, overrides)
    return share_with_target(draft, target)


def assert_same_trees(first: Any, second: Any) -> None:
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


DSPARK = ("torchspec", "torchspec-native", "speculators", "specforge", "specforge-old")


@pytest.mark.parametrize("dialect", DSPARK)
@pytest.mark.parametrize("markov", ["vanilla", "gated", "rnn"])
def test_a_dspark_draft_is_the_same_in_every_packaging(
    tmp_path: Path, dialect: str, markov: str
) -> None:
    pair = TinyPair(markov=markov, confidence="hidden" if markov == "rnn" else "markov")
    ours = read_pair(tmp_path / "ours", pair, "deepspec")
    overrides = DraftOverrides(block_size=pair.block if dialect == "torchspec" else None)
    theirs = read_pair(tmp_path / "theirs", pair, dialect, overrides)
    assert theirs.config == ours.config
    assert ours.config.markov == markov
    assert not ours.config.own_head
    assert_same_trees(load_draft_params(ours, "float32"), load_draft_params(theirs, "float32"))


@pytest.mark.parametrize("dialect", ["z-lab", "z-lab-new"])
def test_a_dflash_draft_is_rank_zero_without_the_anchor_row(tmp_path: Path, dialect: str) -> None:
    pair = TinyPair(markov="none", confidence="none")
    shifted = DraftOverrides(sample_from_anchor=False)
    ours = read_pair(tmp_path / "ours", pair, "deepspec", shifted)
    theirs = read_pair(tmp_path / "theirs", pair, dialect)
    assert theirs.config == ours.config
    assert theirs.config.max_drafts == pair.block - 1
    assert_same_trees(load_draft_params(ours, "float32"), load_draft_params(theirs, "float32"))


def test_every_packaging_is_named_with_its_mark(tmp_path: Path) -> None:
    expected = {
        "deepspec": "deepspec (architecture Qwen3DSparkModel)",
        "torchspec-native": "torchspec (config.json: target_num_hidden_layers)",
        "speculators": "speculators (config.json: speculators_model_type)",
        "specforge": "specforge (dflash_config.projector_type without a speculators key)",
        "z-lab": "z-lab (architecture DFlashDraftModel without a Markov head)",
    }
    for dialect, words in expected.items():
        pair = TinyPair()
        assert read_pair(tmp_path / dialect, pair, dialect).packaging == words
    assert set(expected) < set(DIALECTS)


def test_settings_name_the_key_they_came_from(tmp_path: Path) -> None:
    settings = read_pair(tmp_path, TinyPair(), "speculators").settings
    assert settings["target_layer_ids"].value == [0, 2, 3]
    assert settings["target_layer_ids"].origin == "config.json: aux_hidden_state_layer_ids - 1"
    assert settings["hidden_size"].origin == "config.json: transformer_layer_config.hidden_size"
    assert settings["rope_theta"] == (10000.0, "class default")
    nested = read_pair(tmp_path / "n", TinyPair(), "specforge").settings
    assert nested["mask_token_id"].origin == "config.json: dflash_config.mask_token_id"
    assert nested["enable_confidence_head"].origin.endswith("dflash_config.confidence_head_alpha")


LAYOUTS = [
    # dialect, keys, speculative tokens, sampled from the anchor, a warning
    ("deepspec", {}, None, True, False),
    ("deepspec", {"sample_from_anchor": False}, None, False, False),
    ("deepspec", {"dspark_bonus_anchor": True}, None, False, False),
    ("deepspec", {"dspark_bonus_anchor": False}, None, True, False),
    ("specforge", {}, None, True, False),
    ("z-lab", {}, None, False, False),
    ("z-lab", {"sample_from_anchor": True}, None, True, False),
    ("speculators", {"sample_from_anchor": False}, 4, False, False),
    ("speculators", {"sample_from_anchor": None}, 5, True, False),
    ("speculators", {"sample_from_anchor": None}, 4, False, False),
    ("speculators", {"sample_from_anchor": None}, 3, True, True),
    ("speculators", {"sample_from_anchor": None}, None, True, True),
    ("speculators", {"sample_from_anchor": True}, 4, True, True),
]


@pytest.mark.parametrize(("dialect", "keys", "tokens", "expected", "warned"), LAYOUTS)
def test_slot_layout(
    tmp_path: Path, dialect: str, keys: Any, tokens: int | None, expected: bool, warned: bool
) -> None:
    methods = [] if tokens is None else [{"speculative_tokens": tokens}]
    nested = {"speculators_config": {"proposal_methods": methods}}
    changes = keys | (nested if dialect == "speculators" else {})
    source = read_pair(tmp_path, TinyPair(), dialect, **changes)
    assert source.config.sample_from_anchor is expected
    assert any("anchor" in warning for warning in source.warnings) is warned


def test_a_layout_that_cannot_propose_so_many_is_refused(tmp_path: Path) -> None:
    nested = {"proposal_methods": [{"speculative_tokens": 5}]}
    changes = {"sample_from_anchor": False, "speculators_config": nested}
    with pytest.raises(CheckpointError, match="speculative_tokens is 5, but a block of 5"):
        read_pair(tmp_path, TinyPair(), "speculators", **changes)
    settled = DraftOverrides(sample_from_anchor=True)
    source = read_pair(tmp_path / "b", TinyPair(), "speculators", settled, **changes)
    assert source.config.sample_from_anchor
    assert "overridden" in source.warnings[1]


def test_overrides_win_and_warn(tmp_path: Path) -> None:
    asked = DraftOverrides(block_size=np.int64(4), mask_token_id=9, target_layer_ids=(1, 2, 4))
    source = read_pair(tmp_path, TinyPair(), "deepspec", asked)
    config = source.config
    assert (config.block_size, config.mask_token_id, config.taps) == (4, 9, (1, 2, 4))
    assert len([w for w in source.warnings if "overridden" in w]) == 3
    assert source.settings["block_size"] == (4, "override")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("block_size", 100_000_000, "a positive whole number of at most 16777216, got 100000000"),
        ("block_size", np.int64(0), "a positive whole number of at most"),
        ("mask_token_id", -1, "a whole number from 0 to 16777216, got -1"),
        ("target_layer_ids", (), "a list of layer numbers"),
        ("target_layer_ids", (0,) * 1025, "a list of layer numbers"),
        ("sample_from_anchor", 1, "true or false, got 1"),
    ],
)
def test_overrides_are_held_to_the_bounds_of_a_file(
    tmp_path: Path, name: str, value: Any, words: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_pair(tmp_path, TinyPair(), "deepspec", DraftOverrides(**{name: value}))
    assert f"the override {name} must be {words}" in caught.value.problems[0]
    assert len(caught.value.problems) == 1


def test_default_taps_are_evenly_spaced(tmp_path: Path) -> None:
    assert spaced_taps(36, 5) == (1, 9, 17, 25, 33)
    assert spaced_taps(40, 5) == (1, 10, 19, 28, 37)
    assert spaced_taps(36, 1) == (18,)
    assert spaced_taps(28, 8) == (1, 4, 8, 11, 15, 18, 22, 25)  # halves go to even
    pair = TinyPair(depth=8, draft_depth=3, taps=(1, 3, 5), markov="none", confidence="none")
    tree, tensors = z_lab(pair)
    tree["dflash_config"].pop("target_layer_ids")
    target = read_target(write_target(tmp_path / "target", pair))
    save_json(tmp_path / "draft" / "config.json", tree)
    save_tensors(tmp_path / "draft" / "model.safetensors", tensors)
    assert read_draft(tmp_path / "draft", target).config.taps == (1, 3, 5)


@pytest.mark.parametrize("tap_layers", [(-1, 2), (0, 4)])
def test_taps_reach_from_the_embedding_to_the_last_layer_but_one(
    tmp_path: Path, tap_layers: tuple[int, ...]
) -> None:
    pair = TinyPair(taps=tap_layers)
    assert read_pair(tmp_path, pair, "deepspec").config.taps == tap_layers


def test_a_tap_on_the_last_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"\[0, 2, 5\] reach past layer 4"):
        read_pair(tmp_path, TinyPair(taps=(0, 2, 5)), "deepspec")


def sliding(non_causal: bool | None = None, causal: bool | None = None) -> dict[str, Any]:
    layer = speculators(TinyPair())[0]["transformer_layer_config"] | {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 16,
        "use_sliding_window": True,
    }
    tree: dict[str, Any] = {"transformer_layer_config": layer}
    tree |= {} if non_causal is None else {"sliding_window_non_causal": non_causal}
    return tree | ({} if causal is None else {"is_causal": causal})


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (sliding(), (True, False)),
        (sliding(non_causal=True), (False, False)),
        (sliding(causal=True), (True, True)),
        (sliding(causal=False), (False, False)),
    ],
)
def test_sliding_layers_of_speculators_are_causal_inside_the_block(
    tmp_path: Path, keys: dict[str, Any], expected: tuple[bool, ...]
) -> None:
    config = read_pair(tmp_path, TinyPair(), "speculators", **keys).config
    assert config.layers.windows == (16, 0)
    assert config.causal == expected


def test_sliding_layers_of_dflash_see_the_whole_block(tmp_path: Path) -> None:
    pair = TinyPair(markov="none", confidence="none")
    window = {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 16,
        "use_sliding_window": True,
    }
    config = read_pair(tmp_path, pair, "z-lab", **window).config
    assert config.layers.windows == (16, 0)
    assert config.causal == (False, False)
    causal = {"dflash_config": z_lab(pair)[0]["dflash_config"] | {"causal": True}}
    assert read_pair(tmp_path / "c", pair, "z-lab", **window, **causal).config.causal == (
        True,
        True,
    )


@pytest.mark.parametrize("dialect", list(DIALECTS))
def test_published_keys_are_all_known(tmp_path: Path, dialect: str) -> None:
    none = {"markov": "none", "confidence": "none"} if "z-lab" in dialect else {}
    block = DraftOverrides(block_size=5)
    warnings = read_pair(tmp_path, TinyPair(**none), dialect, block).warnings
    assert not [warning for warning in warnings if "not understood" in warning]


def test_unknown_keys_are_named(tmp_path: Path) -> None:
    source = read_pair(tmp_path, TinyPair(), "deepspec", surprising_gate=2)
    assert any("surprising_gate" in warning for warning in source.warnings)


def test_target_types_differ_in_norms_and_biases(tmp_path: Path) -> None:
    pair = TinyPair()
    plain = {n: x for n, x in pair.target.items() if "q_norm" not in n and "k_norm" not in n}
    biased = dict(plain)
    for layer, (part, rows) in itertools.product(range(6), [("q", 32), ("k", 16), ("v", 16)]):
        biased[f"layers.{layer}.self_attn.{part}_proj.bias"] = pair.array(rows)
    cases = {"llama": plain, "mistral": plain, "qwen2": biased}
    for model_type, tensors in cases.items():
        folder = tmp_path / model_type
        name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2"}[model_type]
        architecture = f"{name}ForCausalLM"
        write_target(
            folder, pair, model_type=model_type, architectures=[architecture], layer_types=None
        )
        save_tensors(folder / "model.safetensors", tensors)
        config = read_target(folder).config.layers
        assert not config.qk_norm
        assert config.qkv_bias is (model_type == "qwen2")
        assert not config.output_bias
        assert replace(config, qkv_bias=False).windows == (0,) * 6

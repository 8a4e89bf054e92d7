"""Contradictory settings, and what is not implemented, end in one sentence and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from convert.__main__ import main
from tests.checkpoints import save_json, write_draft, write_target
from tests.damage import (
    D2T,
    PAIR,
    REMOVED,
    W1,
    Damage,
    assert_refused,
    both,
    config,
    dialect,
    layer,
    move,
    nested,
    other_tokenizers,
    put,
    reduced,
    tensors,
    void,
)

CASES: dict[str, tuple[Damage, str]] = {
    # settings
    "no block size": (dialect("torchspec"), "block_size is missing: pass the trained block size"),
    "block size zero": (config("draft", block_size=0), "block_size must be a positive whole num"),
    "block size a word": (config("draft", block_size="7"), "block_size must be a positive whole"),
    "block size true": (config("draft", block_size=True), "block_size must be a positive whole"),
    "two block sizes": (
        config("draft", dflash_config={"block_size": 4}),
        "block_size is 5, but dflash_config.block_size is 4",
    ),
    "block of one in 1 + N": (
        config("draft", block_size=1, sample_from_anchor=False),
        "block_size must be at least 2",
    ),
    "two layouts": (
        config("draft", sample_from_anchor=True, dspark_bonus_anchor=True),
        "sample_from_anchor and dspark_bonus_anchor are both True",
    ),
    "no mask id": (dialect("speculators", mask_token_id=None), "mask_token_id is missing"),
    "mask id past the embedding": (
        config("draft", mask_token_id=64),
        "mask_token_id 64 is outside the 64 embedding rows",
    ),
    "no taps": (config("draft", target_layer_ids=REMOVED), "target_layer_ids is missing"),
    "empty taps": (config("draft", target_layer_ids=[]), "target_layer_ids must be a list of lay"),
    "taps past the depth": (config("draft", target_layer_ids=[0, 2, 30]), "reach past layer 4"),
    "tap on the last layer": (config("draft", target_layer_ids=[0, 2, 5]), "reach past layer 4"),
    "taps out of order": (config("draft", target_layer_ids=[2, 0, 3]), "must increase"),
    "taps below the embedding": (config("draft", target_layer_ids=[-2, 0, 3]), "must increase"),
    "taps that fc does not read": (
        config("draft", target_layer_ids=[0, 2]),
        "fc.weight in model.safetensors: reads 96 features, but 2 taps",
    ),
    "two lists of taps": (
        config("draft", aux_hidden_state_layer_ids=[0, 2, 3]),
        "name different layers",
    ),
    "draft of a deeper target": (
        config("draft", num_target_layers=36),
        "the draft is for a target of 36 layers, this target has 6",
    ),
    "draft of a wider target": (
        config("draft", target_hidden_size=64),
        "target_hidden_size is 64, the target is 32 wide",
    ),
    "draft of another vocabulary": (
        both(
            tensors("draft", put(W1, 48, 8)),
            config("draft", vocab_size=48),
        ),
        "the draft's vocabulary has 48 rows, the target's 64",
    ),
    "reduced vocabulary without a map": (
        reduced({}),
        "d2t in model.safetensors: missing, but the draft's head has 6",
    ),
    "reduced vocabulary without a head": (
        dialect("specforge", draft_vocab_size=6),
        "lm_head.weight in model.safetensors: missing; a reduced vocabulary needs its own head",
    ),
    "map that leaves the vocabulary": (
        reduced({"d2t": D2T + 60}),
        "d2t in model.safetensors: leads outside the target's 64 ids",
    ),
    "map with two ids on one": (reduced({"d2t": -D2T}), "two draft ids lead to one target id"),
    "map of floats": (
        reduced({"d2t": D2T.astype(np.float32)}),
        "stored as F32, must be one of I64",
    ),
    "map that is short": (reduced({"d2t": D2T[:5]}), "d2t in model.safetensors: shape [5]"),
    "head with fewer rows than declared": (
        reduced({"d2t": D2T}, size=8),
        "draft_vocab_size is 8, but lm_head.weight has 6 rows",
    ),
    "map of a whole vocabulary that moves": (
        tensors("draft", lambda held: held.update(d2t=np.eye(1, 64, dtype=np.int64)[0])),
        "moves ids, although the draft's vocabulary is whole",
    ),
    "no layers": (config("draft", num_hidden_layers=0), "num_hidden_layers must be a whole number"),
    "a billion layers": (config("target", num_hidden_layers=10**9), "num_hidden_layers must be"),
    "no hidden size": (config("draft", hidden_size=REMOVED), "hidden_size is missing"),
    "heads that do not divide": (config("draft", num_key_value_heads=3), "do not divide over 3"),
    "odd heads": (config("draft", head_dim=7), "head_dim must be positive and even"),
    "huge vocabulary": (config("target", vocab_size=10**12), "vocab_size must be a positive"),
    "no limit": (config("target", max_position_embeddings=REMOVED), "max_position_embeddings is m"),
    "no epsilon": (config("draft", rms_norm_eps=None), "rms_norm_eps is missing"),
    "gelu": (config("target", hidden_act="gelu"), "hidden_act is gelu: only silu"),
    "no finite epsilon": (
        config("target", rms_norm_eps=float("nan")),
        "rms_norm_eps must be a positive number, got nan, which is not a finite number",
    ),
    "no finite theta": (
        config("draft", rope_parameters={"rope_theta": float("nan")}),
        "rope_theta must be a positive number, got nan, which is not a finite number",
    ),
    **{
        f"{role} with a second rope base {value}": (
            config(role, rope_theta=value),
            f"rope_theta is {words}, but rope_parameters.rope_theta is 10000.0",
        )
        for role in ("target", "draft")
        for value, words in (
            (5.0, "5.0"),
            (0, "0"),
            (-5, "-5"),
            ("x", "'x'"),
            (True, "True"),
            (1e300, "1e+300"),
            (float("inf"), "inf, which is not a finite number"),
        )
    },
    "target with more rows than its vocabulary": (
        config("target", vocab_size=63),
        "shape [64, 32], but the config asks for [63, 32]; set vocab_size to 64",
    ),
    "head smaller than the draft vocabulary": (
        config("draft", draft_vocab_size=1_000_000),
        "draft_vocab_size is 1000000, but lm_head.weight has 64 rows",
    ),
    "borrowed head smaller than the draft vocabulary": (
        dialect("z-lab", draft_vocab_size=65),
        "draft_vocab_size is 65, but the target has 64 rows",
    ),
    "tables smaller than the vocabulary": (
        config("draft", vocab_size=80),
        "vocab_size is 80, but markov_head.markov_w1.weight has 64 rows",
    ),
    "borrowed embedding smaller than the vocabulary": (
        dialect("z-lab", vocab_size=80),
        "vocab_size is 80, but the target has 64 rows",
    ),
    **{
        f"{role} with {key} {value}": (config(role, **{key: value}), f"{key} must be an object")
        for role in ("target", "draft")
        for key in ("dflash_config", "dspark_config", "transformer_layer_config")
        for value in ("x", [])
    },
    **{
        f"{role} without the q and k norms it has": (
            config(role, use_qk_norm=False),
            "use_qk_norm is False, but the tensor layers.0.self_attn.q_norm.weight is there",
        )
        for role in ("target", "draft")
    },
    # what is not implemented, by name
    "eagle": (config("draft", architectures=["LlamaForCausalLMEagle3"]), "EAGLE family"),
    "eagle tensors": (tensors("draft", put("midlayer.mlp.up_proj.weight", 4, 4)), "EAGLE-3 draft"),
    "medusa": (config("draft", architectures=["MedusaModel"]), "Medusa heads"),
    "mtp": (config("draft", model_type="deepseek_mtp"), "multi-token prediction"),
    "mlp speculator": (config("draft", speculators_model_type="mlp_speculator"), "MLP speculator"),
    "dflash2": (config("draft", architectures=["DFlash2DraftModel"]), "DFlash2 drafts"),
    "domino": (nested(projector_type="domino", gru_hidden_dim=8), "Domino drafts"),
    "dflare": (config("draft", speculators_model_type="dflare"), "DFlare drafts"),
    "gemma draft": (config("draft", architectures=["Gemma4DSparkModel"]), "Gemma models"),
    "gemma target": (config("target", model_type="gemma4"), "Gemma models"),
    "qwen3.5 draft": (config("draft", architectures=["Qwen35DSparkModel"]), "Qwen3.5 and later"),
    "qwen3.5 target": (config("target", model_type="qwen3_5"), "Qwen3.5 and later"),
    "moe target": (config("target", model_type="qwen3_moe"), "mixture-of-experts"),
    "gpt-oss target": (config("target", model_type="gpt_oss"), "gpt-oss models"),
    "lfm2 draft": (config("draft", architectures=["Lfm2DSparkDraftModel"]), "LFM2 models"),
    "nemotron": (
        config("draft", attention_sink_bias=True, dspark_markov_rank=512, dspark_bonus_anchor=True),
        "attention_sink_bias is True: attention sinks are not supported",
    ),
    "nemotron target": (config("target", model_type="nemotron_h"), "Nemotron models"),
    "quantised": (
        config("draft", quantization_config={"quant_method": "modelopt"}),
        "quantised weights are not supported",
    ),
    "gated layers": (config("draft", attn_output_gate=True), "gated attention is not supported"),
    "gated tensors": (
        tensors("draft", put("layers.0.self_attn.gate_proj.weight", 32, 32)),
        "gated attention is not supported",
    ),
    "partial rotary": (
        config("draft", partial_rotary_factor=0.25),
        "partial rotary layers are not",
    ),
    "interleaved rope": (
        config("draft", rope_interleave=True),
        "interleaved RoPE is not supported",
    ),
    "multimodal": (config("target", text_config={}), "multimodal models are not supported"),
    "unknown target": (
        config("target", model_type="phi3", architectures=["Phi3ForCausalLM"]),
        "Phi3ForCausalLM / phi3 is not supported (supported: Qwen3ForCausalLM,",
    ),
    "target of two kinds": (config("target", model_type="llama"), "is not supported (supported:"),
    "unknown draft": (
        config("draft", architectures=["StrangeModel"]),
        "StrangeModel is not a known draft packaging",
    ),
    "llama layers with an unknown type": (layer(model_type="olmo"), "olmo is not supported for dr"),
    "speculators layer of another size": (
        layer(hidden_size=REMOVED),
        "does not go with hidden size 4096",
    ),
    "a draft as the target": (
        both(move("target", "x"), move("draft", "target")),
        "is a draft (it holds fc.weight): pass it as --draft",
    ),
    "a target as the draft": (
        lambda f: void(write_target(f / "draft", PAIR)),
        "Qwen3ForCausalLM is not a known draft packaging; it has no fc.weight",
    ),
    "malformed stop ids": (
        lambda f: save_json(f / "target/generation_config.json", {"eos_token_id": "x"}),
        "generation_config.json: eos_token_id: must be a token id",
    ),
    "another tokenizer": (
        other_tokenizers,
        "the draft is for another tokenizer",
    ),
}


@pytest.mark.parametrize("name", list(CASES))
def test_what_cannot_be_used_ends_in_a_sentence(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, words = CASES[name]
    assert_refused(tmp_path, damage, words, capsys)


def test_the_undamaged_pair_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_target(tmp_path / "target", PAIR)
    write_draft(tmp_path / "draft", PAIR)
    arguments = ["--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft")]
    assert main([*arguments, "--check", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] == "fit"
    assert not report["problems"]
    memory = report["memory"]
    parts = memory["target_bytes"] + memory["draft_bytes"] + memory["cache_bytes"]
    assert memory["total_bytes"] == parts
    block = {"value": 5, "from": "config.json: block_size"}
    assert report["draft"]["settings"]["block_size"] == block

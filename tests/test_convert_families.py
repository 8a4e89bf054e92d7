"""Targets saved by transformers: logits within 2e-5, and the same greedy text over 64 steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dspark_jax import decode
from tests.pairs import load_pair, observed, relative_error
from tests.tiny import Request, quick_compilation

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3 yarn": ("qwen3", {"head_dim": 16, "rope_parameters": YARN}),
    "qwen3 sliding, tied": ("qwen3", {"head_dim": 8, "tie_word_embeddings": True, **SLIDING}),
    "llama 3": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama with biases": ("llama", {"attention_bias": True, "head_dim": 12}),
    "qwen2.5": ("qwen2", {"rms_norm_eps": 1e-5}),
    "mistral": ("mistral", {"sliding_window": 9, "head_dim": 12}),
}
PROMPT = 41


@pytest.fixture(autouse=True, scope="module")
def compile_quickly() -> Any:
    with quick_compilation():
        yield


def save_model(folder: Path, model_type: str, changes: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    config = AutoConfig.for_model(model_type, **SHAPE | changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):  # ones and zeros would hide a mix-up
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder / "target")
    return model


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_target_computes_what_transformers_does(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_model(tmp_path, *FAMILIES[family])
    config, params = load_pair(
        tmp_path, plain=True, max_length=128, prefill_chunk=PROMPT, sampled=False
    )
    prompt = np.random.default_rng(1).integers(0, SHAPE["vocab_size"], PROMPT).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0].numpy()
    state = decode.init_state(config, 1)
    state = decode.admit(config, state, jnp.int32(0), Request(prompt, 64).settings())
    prefill = observed(decode.prefill, monkeypatch)
    chunk = (jnp.asarray(prompt, jnp.int32), jnp.int32(PROMPT), jnp.bool_(True))
    (state, first), seen = prefill(config, params, state, jnp.int32(0), *chunk)
    assert relative_error(seen["target_logits"][0], expected) < 2e-5

    tokens = [int(first.token)]
    while not bool(state.done.all()):
        state, output = decode.decode_rounds(config, params, state, jnp.int32(16))
        tokens += [int(row[0]) for row in output.tokens[0]]
    tokens = tokens[:64]
    with torch.no_grad():  # one pass over the whole text: each token must be what comes next
        following = model(torch.tensor([prompt + tokens])).logits[0].argmax(-1).tolist()
    assert tokens == following[PROMPT - 1 : -1]
    assert len(set(tokens)) > 8  # a text that repeats one token would prove little

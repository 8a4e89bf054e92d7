"""Live parity on random tiny pairs: transformers' target and our own PyTorch draft."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedModel,
    Qwen3Config,
)

from tests.pairs import load_pair, observe_run, relative_error
from tests.tiny import Request, quick_compilation
from tests.torch_reference import TorchDraft, generate, tapped_forward

TOLERANCE = 2e-5  # of the tensor's largest magnitude
PROMPT, STEPS = 21, 64
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
LAYERS = SHAPE | {"num_hidden_layers": 2, "rope_parameters": {"rope_theta": 5000.0}}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SLIDING = ["sliding_attention", "full_attention"]
SPECULATORS_LAYERS = {"layer_types": SLIDING, "sliding_window": 6, "use_sliding_window": True}


@pytest.fixture(autouse=True, scope="module")
def compile_quickly():
    with quick_compilation():
        yield


@dataclass
class Pair:
    """What one random pair is; `draft` holds keys of its configuration."""

    target: dict[str, Any] = field(default_factory=dict)
    family: str = "qwen3"
    draft: dict[str, Any] = field(default_factory=dict)
    speculators: bool = False  # the packaging; else DeepSpec's
    agreeing: bool = False  # a nearly bigram target and a head that knows it
    threshold: float = 0.0


PAIRS = {
    "vanilla": Pair(agreeing=True, threshold=0.5),
    "gated, yarn": Pair(
        draft={"markov_head_type": "gated", "rope_parameters": YARN, "block_size": 3}
    ),
    "rnn": Pair(
        target={"attention_bias": True, "tie_word_embeddings": True},
        draft={"markov_head_type": "rnn", "confidence_head_with_markov": False},
        threshold=0.45,
    ),
    "none, next token layout": Pair(
        draft={"markov_rank": 0, "enable_confidence_head": False, "sample_from_anchor": False},
        speculators=True,
    ),
    "sliding, reduced vocabulary": Pair(
        draft={"draft_vocab_size": 40, "windows": [6, 0], "causal": [True, False]},
        speculators=True,
    ),
    "llama 3 target": Pair(
        family="llama",
        target={"rope_parameters": LLAMA3},
        draft={"rope_parameters": LLAMA3, "attention_bias": True, "target_layer_ids": [1]},
    ),
}


def random_target(pair: Pair) -> PreTrainedModel:
    config = AutoConfig.for_model(pair.family, **SHAPE | pair.target)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    shake(model)
    return model


def random_draft(pair: Pair, target: PreTrainedModel) -> TorchDraft:
    keys = LAYERS | {
        "block_size": 5,
        "mask_token_id": 63,
        "target_layer_ids": [-1, 0, 1],
        "markov_rank": 24,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    draft = TorchDraft(Qwen3Config(**keys | pair.draft)).eval()
    shake(draft)
    kept = torch.randperm(SHAPE["vocab_size"])[: len(draft.draft_to_target)].sort().values
    draft.draft_to_target.copy_(kept)
    with torch.no_grad():
        draft.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
        if len(kept) == SHAPE["vocab_size"]:
            draft.lm_head.weight.copy_(target.get_output_embeddings().weight)
    return draft


def shake(model: torch.nn.Module) -> None:
    """Weights wide enough for uneven laws; norms and biases that are not ones and zeros."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.2)
            else:
                parameter.normal_(0.0, 0.3)


def agree(target: PreTrainedModel, draft: TorchDraft) -> None:
    """Make the target nearly bigram and let the Markov head know the bigrams."""
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight *= 0.02
            layer.mlp.down_proj.weight *= 0.02
        draft.norm.weight *= 0.05
        draft.markov_head.markov_w1.weight.copy_(target.model.norm(draft.embed_tokens.weight))
        draft.markov_head.markov_w2.weight.copy_(target.lm_head.weight)


def save_draft(folder: Path, draft: TorchDraft, pair: Pair) -> None:
    """Write the draft as DeepSpec or as speculators would."""
    config = draft.config
    layer = {name: getattr(config, name) for name in (*LAYERS, "rms_norm_eps", "attention_bias")}
    layer["rope_parameters"] = dict(config.rope_parameters)
    layer |= {"model_type": "qwen3", "hidden_act": "silu"}
    heads = {
        name: getattr(config, name)
        for name in (
            "block_size",
            "mask_token_id",
            "markov_rank",
            "enable_confidence_head",
            *(["markov_head_type"] if config.markov_rank else []),
            *(["confidence_head_with_markov"] if config.enable_confidence_head else []),
        )
    }
    tensors = {
        name: x.contiguous() for name, x in draft.state_dict().items() if "inv_freq" not in name
    }
    if pair.speculators:
        if "windows" in pair.draft:
            layer |= SPECULATORS_LAYERS
        tree = heads | {
            "architectures": ["DSparkDraftModel"],
            "speculators_model_type": "dspark" if config.markov_rank else "dflash",
            "transformer_layer_config": layer,
            "draft_vocab_size": len(draft.draft_to_target),
            "aux_hidden_state_layer_ids": [tap + 1 for tap in draft.taps],
            "sample_from_anchor": draft.from_anchor,
            "sliding_window_non_causal": False,
        }
        if len(draft.draft_to_target) < config.vocab_size:
            tensors["d2t"] = draft.draft_to_target - torch.arange(len(draft.draft_to_target))
    else:
        tree = (
            layer
            | heads
            | {
                "architectures": ["Qwen3DSparkModel"],
                "target_layer_ids": draft.taps,
                "num_target_layers": SHAPE["num_hidden_layers"],
                "tie_word_embeddings": False,
            }
        )
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tree))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", PAIRS)
def test_a_random_pair(name: str, tmp_path: Path, monkeypatch) -> None:
    pair = PAIRS[name]
    torch.manual_seed(1)
    target = random_target(pair)
    draft = random_draft(pair, target)
    if pair.agreeing:
        agree(target, draft)
    target.save_pretrained(tmp_path / "target")
    save_draft(tmp_path / "draft", draft, pair)
    prompt = np.random.default_rng(0).integers(0, 60, PROMPT).tolist()
    theirs = generate(
        target, draft, prompt, max_new_tokens=STEPS, confidence_threshold=pair.threshold
    )
    config, params = load_pair(
        tmp_path,
        max_length=PROMPT + STEPS,
        prefill_chunk=8,
        sampled=False,
        confidence_threshold=pair.threshold,
    )
    ours = observe_run(config, params, Request(prompt, STEPS), monkeypatch)

    logits, tapped = tapped_forward(target, prompt, draft.taps, DynamicCache())
    errors = {
        "target_logits": relative_error(ours.prompt["target_logits"], logits.numpy()),
        "tapped": relative_error(ours.prompt["tapped"], tapped.numpy()),
    }
    for i, (our_round, their_round) in enumerate(zip(ours.rounds, theirs.rounds, strict=True)):
        assert (our_round.start, our_round.anchor) == (their_round.start, their_round.anchor)
        assert our_round.tokens == their_round.block.tokens
        for tensor, value in our_round.tensors.items():
            if tensor in ("context", "hidden", "base", "logits", "confidence"):
                expected = getattr(their_round.block, tensor).numpy()
                errors[f"round{i}.{tensor}"] = relative_error(value, expected)
    print(json.dumps(errors))  # pytest -rP shows it
    assert max(errors.values()) < TOLERANCE, errors
    assert prompt + ours.decoded.tokens == theirs.output_ids
    assert ours.decoded.acceptance_lengths == theirs.acceptance_lengths
    assert ours.decoded.proposal_lengths == theirs.proposal_lengths
    if pair.agreeing:
        assert len(set(theirs.acceptance_lengths)) > 2
    if pair.threshold:
        assert len(set(theirs.proposal_lengths)) > 2

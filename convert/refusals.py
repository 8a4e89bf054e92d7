"""What is recognised and not supported: tables of (mark -> reason), nothing else decides here."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

GATED = "gated attention is not supported"
MOE = "mixture-of-experts layers are not supported"
QUANTISED = "quantised weights are not supported; use the bf16, f16 or f32 checkpoint"

# Architecture or model type (any case, first match) -> what it is. Drafts come first: a draft's
# name often contains its target's.
REFUSED_MODELS: tuple[tuple[str, str], ...] = (
    (r"eagle", "the file is a draft of the EAGLE family, which this package does not run"),
    (r"medusa", "the file holds Medusa heads, which this package does not run"),
    (r"mtp|nextn", "the file is for multi-token prediction (MTP), which this package does not run"),
    (r"mlp_?speculator", "the file is an MLP speculator, which this package does not run"),
    (r"dflash2", "DFlash2 drafts (convolution and selector) are not supported"),
    (r"domino", "Domino drafts (a GRU over the prefix) are not supported"),
    (r"dflare", "DFlare drafts (fusion weights for each layer) are not supported"),
    (r"gemma", "Gemma models (soft-capped logits, four norms a layer) are not supported"),
    (r"gpt_?oss", "gpt-oss models (attention sinks, mixture of experts) are not supported"),
    (r"lfm2", "LFM2 models (convolution layers, interleaved RoPE) are not supported"),
    (r"nemotron", "Nemotron models (hybrid layers) are not supported"),
    (r"qwen3_?5|qwen3_?6|qwen3_?8|qwen3_?next|qwen35", f"Qwen3.5 and later: {GATED}"),
    (r"moe|mixtral|deepseek|glm4|kimi|k3dspark|llama4", MOE),
    (r"vl(for|_|$)|vision|llava|mllama|omni|audio", "multimodal models are not supported"),
)

# Key -> (values that change nothing, reason), looked for at the root and in known sections.
REFUSED_KEYS: dict[str, tuple[tuple[Any, ...], str]] = {
    "quantization_config": ((), QUANTISED),
    "compression_config": ((), QUANTISED),
    "attention_sink_bias": ((False,), "attention sinks are not supported"),
    "add_swa_attention_sink_bias": ((False,), "attention sinks are not supported"),
    "use_swa": ((False,), "a window set by use_swa is not supported"),
    "dflash_query_causal": (
        (False,),
        "causal queries set by dflash_query_causal are not supported",
    ),
    "dspark_markov_rank": ((), "this packaging of DSpark (dspark_ keys) is not supported"),
    "conv_kernel_size": ((), "DFlash2 drafts (convolution and selector) are not supported"),
    "selector_rank": ((), "DFlash2 drafts (convolution and selector) are not supported"),
    "gru_hidden_dim": ((), "Domino drafts (a GRU over the prefix) are not supported"),
    "enable_correction_head": ((False,), "correction heads are not supported"),
    "use_heterogeneous_kv": ((False,), "DFlare drafts are not supported"),
    "log_snr_conditioning": ((False,), "log-SNR conditioning is not supported"),
    "enable_qwen35_gated_q_proj": ((False,), GATED),
    "attn_output_gate": ((False,), GATED),
    "attention_output_gate": ((False,), GATED),
    "partial_rotary_factor": ((1, 1.0), "partial rotary layers are not supported"),
    "rope_interleave": ((False,), "interleaved RoPE is not supported"),
    "rope_interleaved": ((False,), "interleaved RoPE is not supported"),
    "mlp_bias": ((False,), "a bias in the MLP is not supported"),
    "num_experts": ((0, 1), MOE),
    "num_local_experts": ((0, 1), MOE),
    "n_routed_experts": ((0, 1), MOE),
    "final_logit_softcapping": ((), "soft-capped logits are not supported"),
    "attn_logit_softcapping": ((), "soft-capped attention is not supported"),
    "logit_scale": ((1, 1.0), "scaled logits are not supported"),
    "logits_scaling": ((1, 1.0), "scaled logits are not supported"),
    "embedding_multiplier": ((1, 1.0), "a scaled embedding is not supported"),
    "residual_multiplier": ((1, 1.0), "scaled residuals are not supported"),
    "attention_multiplier": ((), "a scale of its own in attention is not supported"),
    "query_pre_attn_scalar": ((), "a scale of its own in attention is not supported"),
    "kv_lora_rank": ((), "multi-head latent attention is not supported"),
    "emb_dim": ((), "a projected embedding is not supported"),
    "token_code_dim": ((), "token codes are not supported"),
}
SECTIONS = ("", "dflash_config", "dspark_config", "transformer_layer_config")

# Tensor name (first match of each pattern is reported) -> reason.
REFUSED_TENSORS: tuple[tuple[str, str], ...] = (
    (r"midlayer\.|eagle", "the file is an EAGLE-3 draft, which this package does not run"),
    (r"medusa", "the file holds Medusa heads, which this package does not run"),
    (r"(^|\.)(mtp|nextn)|eh_proj|(^|\.)[eh]norm\.", "the file is for multi-token prediction (MTP)"),
    (r"experts?[._]|\.router\.|mlp\.gate\.weight", MOE),
    (r"weight_scale|weight_packed|qweight|qzeros|\.scales$|weight_zero_point|absmax", QUANTISED),
    (r"linear_attn\.|\.mamba|\.conv\.", "layers other than attention are not supported"),
    (r"self_attn\.(g|gate|gate_proj|g_proj)\.", GATED),
    (r"prefix_gru", "Domino drafts (a GRU over the prefix) are not supported"),
    (r"selector|conv1d", "DFlash2 drafts (convolution and selector) are not supported"),
    (r"fusion_(weights|norms)", "DFlare drafts are not supported"),
    (r"sinks?($|_bias)", "attention sinks are not supported"),
    (r"(pre|post)_feedforward_layernorm|layer_scalar", "Gemma layers are not supported"),
    (r"self_attn\.qkv_proj|mlp\.gate_up_proj", "projections stored fused are not supported"),
    (r"kv_a_proj|q_a_proj", "multi-head latent attention is not supported"),
    (r"lora_[AB]", "adapters are not supported: merge them into the weights first"),
    (r"vision|visual", "multimodal models are not supported"),
)

# Keys that are read somewhere, or change nothing here (training, generation, bookkeeping).
KNOWN_KEYS = frozenset(
    """
    _attn_implementation_internal _name_or_path architectures attention_bias attention_dropout
    attention_mode attn_implementation auto_map aux_hidden_state_layer_ids block_size bos_token_id
    cache_implementation causal ce_loss_alpha chunk_size_feed_forward confidence_detach_features
    confidence_head_alpha confidence_head_bias confidence_head_with_markov dflash_config
    draft_vocab_size dspark_block_size dspark_bonus_anchor dspark_config dspark_noise_token_id
    dtype eagle_aux_hidden_state_layer_ids enable_confidence_head eos_token_id has_embed_tokens
    has_lm_head head_dim hidden_act hidden_size id2label initializer_range intermediate_size
    is_causal is_decoder keys_to_ignore_at_inference label2id layer_types loss_decay_gamma
    markov_head_type markov_rank mask_token_id max_anchors max_position_embeddings
    max_window_layers model_type num_anchors num_attention_heads num_hidden_layers
    num_key_value_heads num_target_layers original_max_position_embeddings output_attentions
    output_hidden_states pad_token_id pretraining_tp problem_type projector_type return_dict
    rms_norm_eps rope_parameters rope_scaling rope_theta sample_from_anchor sliding_window
    speculators_config speculators_model_type speculators_version target_hidden_size
    target_layer_ids target_num_hidden_layers tie_word_embeddings torch_dtype
    transformer_layer_config transformers_version tv_loss_alpha unk_token_id use_cache
    use_confidence_head use_qk_norm use_sliding_window vocab_size
    """.split()  # noqa: SIM905
)

# Keys that decide something where they are read, and would mislead anywhere else.
PLACED_KEYS = frozenset(
    """
    attention_bias aux_hidden_state_layer_ids block_size confidence_head_with_markov
    draft_vocab_size dspark_block_size dspark_bonus_anchor dspark_noise_token_id
    eagle_aux_hidden_state_layer_ids enable_confidence_head num_target_layers
    target_num_hidden_layers
    head_dim hidden_act hidden_size intermediate_size markov_head_type markov_rank mask_token_id
    num_attention_heads num_hidden_layers num_key_value_heads
    rms_norm_eps rope_parameters rope_scaling rope_theta sample_from_anchor target_hidden_size
    target_layer_ids tie_word_embeddings use_qk_norm vocab_size
    """.split()  # noqa: SIM905
)


class Refusal(NamedTuple):
    """One mark found and the reason it is refused for."""

    mark: str
    reason: str

    def __str__(self) -> str:
        return f"{self.mark}: {self.reason}"


def refused_model(name: str) -> str:
    """Return why this architecture or model type is refused; empty if it is not."""
    reasons = (reason for pattern, reason in REFUSED_MODELS if re.search(pattern, name.lower()))
    return next(reasons, "")


def refused_keys(tree: dict[str, Any]) -> list[Refusal]:
    """Return the keys of a config.json whose values ask for what is not supported."""
    found = []
    for section in SECTIONS:
        values = tree.get(section) if section else tree
        for key, value in (values if isinstance(values, dict) else {}).items():
            if value is None or key not in REFUSED_KEYS:
                continue
            neutral, reason = REFUSED_KEYS[key]
            if not any(value == n for n in neutral):
                path = f"{section}.{key}" if section else key
                found.append(Refusal(f"{path} is {str(value)[:40]}", reason))
    return found


def refused_tensors(names: Iterable[str]) -> list[Refusal]:
    """Return one refusal for each pattern that a tensor name matches."""
    ordered = list(names)
    found = []
    for pattern, reason in REFUSED_TENSORS:
        hit = next((name for name in ordered if re.search(pattern, name)), None)
        if hit is not None:
            found.append(Refusal(hit, reason))
    return found

"""A tiny draft in every packaging: the config and the tensors, as each trainer writes them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.tiny_pair import Tensors, TinyPair, Tree


def deepspec(pair: TinyPair) -> tuple[Tree, Tensors]:
    """P1: every key at the root, own copies of embedding and head."""
    tree = pair.layer_tree(pair.draft_depth) | pair.markov_tree()
    tree |= {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": pair.block,
        "mask_token_id": pair.mask,
        "target_layer_ids": list(pair.taps),
        "num_target_layers": pair.depth,
        "num_anchors": 4,
        "tie_word_embeddings": False,
    }
    return tree, pair.draft | pair.own()


def torchspec(pair: TinyPair) -> tuple[Tree, Tensors]:
    """P2 as published: standard names, own embedding, neither head nor block size."""
    tree, tensors = deepspec(pair)
    tree.pop("block_size")
    tensors.pop("lm_head.weight")
    return tree, tensors


def torchspec_native(pair: TinyPair) -> tuple[Tree, Tensors]:
    """P2 as the trainer writes it: other names, and `num_target_layers` counts taps."""
    tree, tensors = deepspec(pair)
    tree |= {
        "model_type": "dflash",
        "target_hidden_size": pair.hidden,
        "target_num_hidden_layers": pair.depth,
        "num_target_layers": len(pair.taps),
    }
    renamed = {"fc": "context_proj", "hidden_norm": "context_norm", "norm": "final_norm"}
    tensors = {
        renamed.get(n.removesuffix(".weight"), n.removesuffix(".weight")) + ".weight"
        if n.endswith(".weight")
        else n: x
        for n, x in pair.draft.items()
    }
    return tree, tensors


def speculators(pair: TinyPair) -> tuple[Tree, Tensors]:
    """P3: the decoder layer as a difference from its class, taps counted one higher."""
    same_as_class = ("rope_parameters", "max_position_embeddings", "rms_norm_eps", "layer_types")
    layer = pair.layer_tree(pair.draft_depth)
    layer = {k: v for k, v in layer.items() if k not in same_as_class and v not in (None, False)}
    tree = {
        "architectures": ["DSparkDraftModel"],
        "auto_map": {"": "config.DSparkSpeculatorConfig"},
        "speculators_model_type": "dspark" if pair.markov != "none" else "dflash",
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": pair.block}],
            "verifier": {"name_or_path": "org/target", "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": pair.vocab,
        "block_size": pair.block,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in pair.taps],
        "mask_token_id": pair.mask,
        "target_hidden_size": None,
        "sliding_window_non_causal": False,
        "sample_from_anchor": True,
    }
    tensors = pair.draft | pair.own() | {"t2d": np.ones(pair.vocab, bool)}
    return tree | pair.markov_tree(), tensors


def specforge(pair: TinyPair) -> tuple[Tree, Tensors]:
    """P4: everything nested, transformers 4 rope keys, neither embedding nor head."""
    tree = pair.layer_tree(pair.draft_depth)
    tree.pop("rope_parameters")
    markov = pair.markov_tree()
    enabled = markov.pop("enable_confidence_head")
    tree |= {
        "architectures": ["DSparkDraftModel"],
        "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "block_size": pair.block,
        "num_target_layers": pair.depth,
        "torch_dtype": "bfloat16",
        "dflash_config": {
            "projector_type": "dspark",
            "attention_mode": "gqa",
            "mask_token_id": pair.mask,
            "target_layer_ids": list(pair.taps),
            "confidence_head_alpha": 1.0 if enabled else 0.0,
            **markov,
        },
    }
    return tree, dict(pair.draft)


def specforge_old(pair: TinyPair) -> tuple[Tree, Tensors]:
    """P4, older: the heads under `logit_head.`, settings repeated in `dspark_config`."""
    tree, tensors = specforge(pair)
    tree["dspark_config"] = dict(tree["dflash_config"])
    heads = ("markov_head", "confidence_head")
    return tree, {f"logit_head.{n}" if n.startswith(heads) else n: x for n, x in tensors.items()}


def z_lab(pair: TinyPair) -> tuple[Tree, Tensors]:
    """P5: DFlash in the 1 + N layout; no heads, neither embedding nor head."""
    tree, _ = specforge(pair)
    tree |= {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "dflash_config": {"mask_token_id": pair.mask, "target_layer_ids": list(pair.taps)},
    }
    return tree, {n: x for n, x in pair.draft.items() if "_head" not in n}


def z_lab_new(pair: TinyPair) -> tuple[Tree, Tensors]:
    """P5, newer: the block size nested too."""
    tree, tensors = z_lab(pair)
    tree["dflash_config"]["block_size"] = tree.pop("block_size")
    return tree, tensors


DIALECTS: dict[str, Callable[[TinyPair], tuple[Tree, Tensors]]] = {
    "deepspec": deepspec,
    "torchspec": torchspec,
    "torchspec-native": torchspec_native,
    "speculators": speculators,
    "specforge": specforge,
    "specforge-old": specforge_old,
    "z-lab": z_lab,
    "z-lab-new": z_lab_new,
}

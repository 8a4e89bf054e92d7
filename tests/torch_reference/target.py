"""The target: a transformers causal language model whose hidden states are tapped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel


def load_target(folder: str | Path) -> PreTrainedModel:
    """Read a checkpoint folder in float32 with the plain attention."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


@torch.no_grad()
def tapped_forward(
    model: PreTrainedModel, ids: Sequence[int], taps: Sequence[int], cache: DynamicCache
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `ids` after the cached rows; return logits [T, V] and features [T, C*D].

    Tap i is the output of layer i; -1 is the embedding.
    """
    # The cache goes in by place: transformers renames its keyword within version 5.
    output = model(
        torch.tensor([list(ids)]), None, None, cache, use_cache=True, output_hidden_states=True
    )
    tapped = [output.hidden_states[tap + 1][0] for tap in taps]
    features = torch.cat(tapped, dim=-1) if tapped else output.logits.new_zeros(len(ids), 0)
    return output.logits[0], features

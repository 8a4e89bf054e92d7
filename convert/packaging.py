"""Checkpoint folders -> resolved settings, without reading weights; nothing later knows dialects.

Only config.json and the safetensors headers are read: some settings are decided by tensors.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from convert.decoder import MODEL_TYPES, read_layers
from convert.dialects import W1, DraftOverrides, DraftReading, architectures, identify
from convert.fit import resolve_draft
from convert.names import (
    Ignored,
    check_tensors,
    draft_plan,
    target_plan,
    weights_words,
    without_absent_bias,
)
from convert.problems import CheckpointError, raise_problems
from convert.reader import equal_tensors
from convert.settings import FLAG, LENGTH, SIZE, WORD, ConfigReading
from convert.sources import DraftSource, TargetSource, open_folder
from convert.tokens import compare_tokenizers
from dspark_jax.config import LayersConfig, TargetConfig

__all__ = [
    "DraftOverrides",
    "DraftSource",
    "TargetSource",
    "read_draft",
    "read_target",
    "share_with_target",
]

HEAD, EMBEDDING, MAP = "lm_head.weight", "embed_tokens.weight", "d2t"
ARCHITECTURES = {
    "Qwen3ForCausalLM": "qwen3",
    "Qwen2ForCausalLM": "qwen2",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
}


def read_target(folder: str | Path) -> TargetSource:
    """Resolve a target checkpoint: Qwen3, Llama 3, Qwen2.5 or Mistral in safetensors.

    Raises CheckpointError with every problem found; no weight is read.
    """
    opened = open_folder(folder, "target")
    reading, problems, named = opened.reading, opened.reading.problems, opened.named
    if "fc.weight" in named:
        raise CheckpointError("is a draft (it holds fc.weight): pass it as --draft", opened.subject)
    model_type = _target_type(reading)
    if not model_type:
        raise CheckpointError(problems, opened.subject)
    layers = read_layers(reading, model_type, qk_norm=model_type == "qwen3")
    config = _target_config(reading, layers)
    raise_problems(problems, opened.subject)
    assert config is not None
    tied_head = named.pop(HEAD, None) if config.tied else None
    if tied_head is not None:
        reason = "tied: held against embed_tokens.weight, which it must equal"
        opened.ignored.append(Ignored(HEAD, tied_head.file.name, reason))
    plan = target_plan(config)
    problems += opened.duplicates
    check_tensors(plan, named, problems, padding=False)
    raise_problems(problems, opened.subject)
    described = opened.described(f"transformers ({model_type})", plan)
    return TargetSource(**described, config=config, tied_head=tied_head)


def _target_type(reading: ConfigReading) -> str:
    """Return the model type; empty after a problem."""
    names, before = architectures(reading.tree), len(reading.problems)
    model_type = reading.find("model_type", WORD)
    if any(re.search("DSpark|DFlash|Speculator", name) for name in names):
        reading.problem(f"architecture {names[0]} is a draft: pass it as --draft")
    found = {ARCHITECTURES.get(name, "") for name in names} | ({model_type} - {None})
    if len(reading.problems) == before:
        if len(found) == 1 and (only := found.pop()) in MODEL_TYPES:
            return str(only)
        what = " / ".join([*names, str(model_type)])
        reading.problem(f"{what} is not supported (supported: {', '.join(ARCHITECTURES)})")
    return ""


def _target_config(reading: ConfigReading, layers: LayersConfig | None) -> TargetConfig | None:
    vocab = reading.require("vocab_size", SIZE)
    limit = reading.require("max_position_embeddings", LENGTH)
    tied = bool(reading.layer("tie_word_embeddings", FLAG, False))
    if layers is None or vocab is None or limit is None:
        return None
    try:
        return TargetConfig(layers=layers, vocab_size=vocab, max_length=limit, tied=tied)
    except ValueError as error:
        reading.problem(str(error))
        return None


def read_draft(
    folder: str | Path, target: TargetSource, overrides: DraftOverrides | None = None
) -> DraftSource:
    """Resolve a draft checkpoint in any packaging against its target.

    Raises CheckpointError with every problem found; no weight is read. The draft's own embedding
    and head are kept: `share_with_target` drops those that the target holds too.
    """
    opened = open_folder(folder, "draft")
    reading, problems, named = opened.reading, opened.reading.problems, opened.named
    packaging = identify(reading.tree, opened.raw_names, W1 in named)
    if packaging is None:
        names = " / ".join(architectures(reading.tree)) or "no architecture"
        hint = "" if "fc.weight" in named else "; it has no fc.weight, so it is not a DSpark draft"
        reading.problem(f"{names} is not a known draft packaging{hint}")
        raise CheckpointError(problems, opened.subject)
    shapes = {name: tensor.shape for name, tensor in named.items()}
    draft = DraftReading(
        reading,
        shapes,
        packaging,
        overrides or DraftOverrides(),
        opened.warnings,
        weights_words(named.values()),
    )
    if draft.own_tied_head():
        named[HEAD] = named[EMBEDDING]
    config = resolve_draft(draft, target.config)
    _hold_tokenizers(draft, target.folder, opened.folder)
    raise_problems(problems, opened.subject)
    assert config is not None
    identity_map = None if config.reduced_vocabulary else named.pop(MAP, None)
    if identity_map is not None:
        reason = "the vocabulary is whole: held against all zeros, which it must be"
        opened.ignored.append(Ignored(MAP, identity_map.file.name, reason))
    plan = without_absent_bias(draft_plan(config), named)
    problems += opened.duplicates
    opened.warnings.extend(check_tensors(plan, named, problems))
    raise_problems(problems, opened.subject)
    described = opened.described(f"{packaging.name} ({packaging.why})", plan)
    return DraftSource(**described, config=config, identity_map=identity_map)


def _hold_tokenizers(draft: DraftReading, target: Path, folder: Path) -> None:
    """A draft of another tokenizer drafts other words under the same ids."""
    words, differ, far = compare_tokenizers(target, folder)
    draft.config.record("tokenizer", words, "tokenizer.json")
    if far:
        draft.problems.append(f"tokenizer.json: {words}: the draft is for another tokenizer")
    elif differ:
        draft.warnings.append(f"tokenizer.json: {words}")


def share_with_target(draft: DraftSource, target: TargetSource) -> DraftSource:
    """Drop the draft's own embedding and head where the target's are equal, bit for bit.

    The two files are compared in small pieces; nothing stays in memory. Published drafts carry
    exact copies (2.5 GB for an 8B target).
    """
    theirs = {
        "own_embedding": (EMBEDDING, target.tensors[EMBEDDING]),
        "own_head": (HEAD, target.tensors.get(HEAD, target.tensors[EMBEDDING])),
    }
    shared = []
    for flag, (name, tensor) in theirs.items():
        reduced = flag == "own_head" and draft.config.reduced_vocabulary
        if getattr(draft.config, flag) and not reduced:
            shared += [flag] if equal_tensors(draft.tensors[name], tensor) else []
    if not shared:
        return draft
    config = replace(
        draft.config,
        own_embedding=draft.config.own_embedding and "own_embedding" not in shared,
        own_head=draft.config.own_head and "own_head" not in shared,
    )
    dropped = [theirs[flag][0] for flag in shared]
    plan = {name: entry for name, entry in draft.plan.items() if name not in dropped}
    ignored = draft.ignored + tuple(
        Ignored(name, draft.tensors[name].file.name, "equal to the target's, which is shared")
        for name in dropped
    )
    kept = {name: tensor for name, tensor in draft.tensors.items() if name not in dropped}
    return replace(draft, config=config, plan=plan, ignored=ignored, tensors=kept)

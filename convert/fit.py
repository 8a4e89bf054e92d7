"""A draft's settings held against its target -> DraftConfig."""

from __future__ import annotations

from convert.decoder import CLASS_DEFAULTS, read_layers
from convert.dialects import W1, W2, DraftReading, decoder_type
from convert.draft_settings import (
    read_block_size,
    read_causal,
    read_confidence,
    read_layout,
    read_markov,
    read_mask_token,
    read_taps,
)
from convert.settings import SIZE
from dspark_jax.config import DraftConfig, LayersConfig, TargetConfig

MOST_PADDING = 1024  # rows a vocabulary may be padded by; more is another vocabulary


def resolve_draft(draft: DraftReading, target: TargetConfig) -> DraftConfig | None:
    """Resolve every setting of a draft for this target; None after a problem.

    Problems gather in `draft.problems`, warnings in `draft.warnings`.
    """
    reading, before = draft.config, len(draft.problems)
    if draft.packaging.name == "speculators":
        reading.section = "transformer_layer_config"
        reading.defaults = CLASS_DEFAULTS["qwen3"]
    model_type = decoder_type(reading)
    if reading.section:
        reading.defaults = CLASS_DEFAULTS[model_type]
    qk_norm = "layers.0.self_attn.q_norm.weight" in draft.shapes
    layers = read_layers(reading, model_type, qk_norm)
    vocab = _draft_vocabulary(draft, target.vocab_size)
    block, mask = read_block_size(draft), read_mask_token(draft)
    markov, rank = read_markov(draft)
    from_anchor = read_layout(draft, block)
    if layers is None:
        return None
    confidence = read_confidence(draft, layers.hidden_size, rank)
    taps = _fitting_taps(draft, layers, target)
    causal = read_causal(draft, layers.windows)
    own_embedding, own_head = _own(draft, layers, target, reduced=vocab < target.vocab_size)
    if len(draft.problems) > before:
        return None
    try:
        return DraftConfig(
            layers=layers,
            vocab_size=target.vocab_size,
            draft_vocab_size=vocab,
            block_size=block,
            mask_token_id=mask,
            taps=taps,
            target_hidden_size=target.layers.hidden_size,
            markov=markov,
            markov_rank=rank,
            confidence=confidence,
            sample_from_anchor=from_anchor,
            causal=causal,
            own_embedding=own_embedding,
            own_head=own_head,
        )
    except ValueError as error:
        reading.problem(str(error))
        return None


def _fitting_taps(
    draft: DraftReading, layers: LayersConfig, target: TargetConfig
) -> tuple[int, ...]:
    """Return the taps after holding them against the target's depth and the width of fc."""
    reading, depth, width = draft.config, target.layers.num_layers, target.layers.hidden_size
    taps = read_taps(draft, depth, layers.num_layers)
    if taps and max(taps) > depth - 2:
        reading.problem(
            f"target_layer_ids {list(taps)} reach past layer {depth - 2}, the last one that can be"
            f" tapped in a target of {depth} layers"
        )
    shape = draft.shapes.get("fc.weight", ())
    if len(shape) == 2 and taps and shape[1] != len(taps) * width:
        draft.tensor_problem(
            "fc.weight",
            f"reads {shape[1]} features, but {len(taps)} taps of a target {width} wide"
            f" give {len(taps) * width}: this draft is not for this target, or target_layer_ids"
            " is wrong",
        )
    given = reading.find("target_hidden_size", SIZE)
    if given is not None and given != width:
        reading.problem(f"target_hidden_size is {given}, the target is {width} wide")
    _check_depth(draft, depth, len(taps))
    return taps


def _check_depth(draft: DraftReading, depth: int, taps: int) -> None:
    """TorchSpec counts taps in `num_target_layers`; everyone else counts target layers."""
    reading = draft.config
    true_depth = reading.find("target_num_hidden_layers", SIZE)
    counted = reading.find("num_target_layers", SIZE)
    if true_depth is None and counted is not None and counted != taps:
        true_depth = counted
    elif true_depth is not None and counted is not None and counted != taps:
        reading.problem(f"num_target_layers is {counted}, but there are {taps} taps")
    if true_depth is not None and true_depth != depth:
        reading.problem(
            f"the draft is for a target of {true_depth} layers, this target has {depth}"
        )


def _draft_vocabulary(draft: DraftReading, target_rows: int) -> int:
    """Return the rows of the draft's head that are used; below the target's when reduced."""
    reading = draft.config
    declared = draft.anywhere("draft_vocab_size", SIZE)
    mapped = draft.shapes.get("d2t", ())
    head = draft.shapes.get("lm_head.weight", draft.shapes.get(W2, ()))
    rows = declared or next((shape[0] for shape in (mapped, head) if shape), target_rows)
    _hold_rows(draft, "draft_vocab_size", declared, ("lm_head.weight", W2), target_rows)
    more = (reading.path("vocab_size"),) if reading.section else ()
    named = draft.anywhere("vocab_size", SIZE, *more)
    _hold_rows(draft, "vocab_size", named, (W1, "embed_tokens.weight"), target_rows)
    table = next((s[0] for n in (W1, "embed_tokens.weight") if (s := draft.shapes.get(n))), named)
    for count in {n for n in (named, table) if n is not None}:
        if not target_rows <= count <= target_rows + MOST_PADDING:
            reading.problem(
                f"the draft's vocabulary has {count} rows, the target's {target_rows}: they are"
                " not of one tokenizer"
            )
            return target_rows
    if rows >= target_rows:
        return target_rows
    if not mapped:
        draft.tensor_problem(
            "d2t",
            f"missing, but the draft's head has {rows} rows for {target_rows} target ids: a"
            " reduced vocabulary needs its map",
        )
    return rows


def _hold_rows(
    draft: DraftReading, key: str, declared: int | None, names: tuple[str, ...], target_rows: int
) -> None:
    """Refuse a vocabulary that is larger than a tensor which holds it, or than the target's."""
    stored = {name: shape[0] for name in names if (shape := draft.shapes.get(name))}
    for name, rows in (stored or {"the target": target_rows}).items():
        if declared is not None and declared > rows:
            draft.config.problem(
                f"{key} is {declared}, but {name} has {rows} rows: set it to the rows there are"
            )


def _own(
    draft: DraftReading, layers: LayersConfig, target: TargetConfig, reduced: bool
) -> tuple[bool, bool]:
    """Return whether the file holds the draft's own embedding and its own head."""
    embedding, head = ("embed_tokens.weight" in draft.shapes, "lm_head.weight" in draft.shapes)
    width, wide = layers.hidden_size, target.layers.hidden_size
    if reduced and not head:
        draft.tensor_problem("lm_head.weight", "missing; a reduced vocabulary needs its own head")
    elif width != wide and not (embedding and head):
        draft.tensor_problem(
            "embed_tokens.weight or lm_head.weight",
            f"missing, and the target's are {wide} wide where the draft is {width}",
        )
    return embedding, head

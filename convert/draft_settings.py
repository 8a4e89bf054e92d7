"""Each setting of a draft: where every packaging keeps it, and what decides when it is absent."""

from __future__ import annotations

from typing import Literal

from convert.dialects import NESTED, W1, W2, DraftReading, architectures
from convert.settings import (
    COUNT,
    FLAG,
    LAYER_IDS,
    POSITIVE,
    SIZE,
    WORD,
    ConfigReading,
    Setting,
    brief,
)

CONFIDENCE = "confidence_head.proj.weight"


def read_block_size(draft: DraftReading) -> int:
    """Return the rows of the trained block (0 after a problem)."""
    before = len(draft.problems)
    size = draft.anywhere("block_size", SIZE, "dspark_block_size")
    size = draft.overridden("block_size", SIZE, size)
    if size is None and len(draft.problems) == before:
        draft.config.problem(
            "block_size is missing: pass the trained block size (--block-size; 7 is common)"
        )
    return size or 0


def read_mask_token(draft: DraftReading) -> int:
    """Return the id that fills the block (0 after a problem)."""
    before = len(draft.problems)
    token = draft.anywhere("mask_token_id", COUNT, "dspark_noise_token_id")
    token = draft.overridden("mask_token_id", COUNT, token)
    if token is None and len(draft.problems) == before:
        draft.config.problem("mask_token_id is missing: pass it (--mask-token-id)")
    return token or 0


def read_taps(draft: DraftReading, target_depth: int, draft_depth: int) -> tuple[int, ...]:
    """Return the tapped target layers, -1 being the embedding (empty after a problem).

    The speculators spelling counts the embedding as 0. Without a list, DFlash files of z-lab
    mean as many layers as the draft has, evenly spaced from 1 to L - 3.
    """
    before = len(draft.problems)
    direct = draft.anywhere("target_layer_ids", LAYER_IDS)
    shifted = draft.config.find(
        "shifted", LAYER_IDS, "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"
    )
    origin = draft.config.settings.pop("shifted", None)
    if shifted is not None and origin is not None:
        lowered = [layer - 1 for layer in shifted]
        if direct is not None and direct != lowered:
            draft.config.problem(
                f"target_layer_ids {direct} and {origin.origin.split(': ')[1]} {shifted}"
                " (which counts one higher) name different layers"
            )
        direct = draft.config.record("target_layer_ids", lowered, f"{origin.origin} - 1")
    if draft.overrides.target_layer_ids is not None:
        return draft.overridden("target_layer_ids", LAYER_IDS, direct and tuple(direct)) or ()
    if direct is None and len(draft.problems) == before:
        if draft.packaging.name == "z-lab":
            spaced = spaced_taps(target_depth, draft_depth)
            draft.config.record("target_layer_ids", list(spaced), "evenly spaced (file has none)")
            return spaced
        draft.config.problem("target_layer_ids is missing: pass it (--target-layer-ids)")
    return tuple(direct or ())


def spaced_taps(target_depth: int, draft_depth: int) -> tuple[int, ...]:
    """Return the default taps of a DFlash draft: evenly from 1 to L - 3, Python's round."""
    if draft_depth == 1:
        return (target_depth // 2,)
    span = target_depth - 4
    return tuple(round(1 + i * span / (draft_depth - 1)) for i in range(draft_depth))


def read_markov(draft: DraftReading) -> tuple[Literal["none", "vanilla", "gated", "rnn"], int]:
    """Return the kind and rank of the Markov head; tensors decide, the file must not disagree."""
    rank = draft.anywhere("markov_rank", COUNT)
    word = draft.anywhere("markov_head_type", WORD)
    shape = draft.shapes.get(W1)
    if shape is None:
        if rank:
            draft.config.problem(f"markov_rank is {rank}, but the tensor {W1} is missing")
        elif W2 in draft.shapes:
            draft.tensor_problem(W1, f"missing, although {W2} is there")
        elif word not in (None, "none") and rank is None:
            draft.warnings.append(f"markov_head_type is {word}, but there is no Markov head")
        return "none", 0
    kind: Literal["vanilla", "gated", "rnn"] = "vanilla"
    if "markov_head.gate_proj.weight" in draft.shapes:
        kind = "gated"
    if "markov_head.joint_proj.weight" in draft.shapes:
        kind = "rnn"
    if len(shape) != 2 or (rank is not None and shape[-1] != rank):
        draft.config.problem(f"markov_rank is {rank}, but {W1} has shape {list(shape)}")
    if word is not None and word != kind:
        draft.config.problem(f"markov_head_type is {word}, but the tensors are those of {kind}")
    made = shape[-1] if shape else 0
    for name, value in (("markov_head_type", kind), ("markov_rank", made)):
        draft.config.settings.setdefault(name, Setting(value, "tensor shapes"))
    return kind, made


def read_confidence(
    draft: DraftReading, width: int, rank: int
) -> Literal["none", "hidden", "markov"]:
    """Return what the confidence head reads; its input width decides."""
    paths = [f"{n}.use_confidence_head" for n in NESTED]
    enabled = draft.anywhere("enable_confidence_head", FLAG, *paths)
    with_markov = draft.anywhere("confidence_head_with_markov", FLAG)
    alpha = draft.config.present("dflash_config.confidence_head_alpha")
    if enabled is None and alpha and POSITIVE.holds(alpha[0][1]):
        enabled = draft.config.record("enable_confidence_head", True, f"config.json: {alpha[0][0]}")
    shape = draft.shapes.get(CONFIDENCE)
    if (shape is not None) != bool(enabled) and enabled is not None:
        draft.config.problem(
            f"enable_confidence_head is {enabled}, but the tensor {CONFIDENCE} is"
            f" {'there' if shape is not None else 'missing'}"
        )
    if shape is None:
        return "none"
    widths: dict[tuple[int, ...], Literal["hidden", "markov"]] = {
        (1, width + rank): "markov",
        (1, width): "hidden",
    }
    reads = widths.get(shape)
    if reads is None or (with_markov is not None and rank and with_markov != (reads == "markov")):
        draft.config.problem(
            f"{CONFIDENCE} has shape {list(shape)}, which does not go with hidden size {width},"
            f" Markov rank {rank} and confidence_head_with_markov {with_markov}"
        )
        return "none"
    return reads


def read_layout(draft: DraftReading, block_size: int) -> bool:
    """Return whether the anchor's row is sampled (True) or only the rows after it (1 + N).

    An explicit key decides, then block size minus the proposed tokens, then the packaging.
    """
    explicit = _explicit_layout(draft)
    proposed = _proposed_tokens(draft.config)
    spare = block_size - proposed if proposed else None
    if draft.overrides.sample_from_anchor is not None:
        return bool(draft.overridden("sample_from_anchor", FLAG, explicit))
    if explicit is not None:
        _check_proposed(draft, explicit, block_size, proposed)
        return bool(explicit)
    if spare in (0, 1):
        path = "config.json: block_size - speculative_tokens"
        return bool(draft.config.record("sample_from_anchor", spare == 0, path))
    return _packaging_layout(draft)


def _explicit_layout(draft: DraftReading) -> bool | None:
    """`dspark_bonus_anchor` says the same the other way round."""
    explicit = draft.anywhere("sample_from_anchor", FLAG)
    bonus = draft.anywhere("dspark_bonus_anchor", FLAG)
    origin = draft.config.settings.pop("dspark_bonus_anchor", None)
    if bonus is None or origin is None:
        return explicit
    if explicit is bonus:
        draft.config.problem(f"sample_from_anchor and dspark_bonus_anchor are both {bonus}")
    return bool(draft.config.record("sample_from_anchor", not bonus, f"not {origin.origin}"))


def _check_proposed(
    draft: DraftReading, explicit: bool, block_size: int, proposed: int | None
) -> None:
    most = block_size if explicit else block_size - 1
    if proposed is not None and proposed > most:
        draft.config.problem(
            f"speculative_tokens is {proposed}, but a block of {block_size} with"
            f" sample_from_anchor {str(explicit).lower()} yields {most}; settle it with"
            " --sample-from-anchor or --no-sample-from-anchor"
        )
    elif explicit and proposed == block_size - 1:
        draft.warnings.append(
            f"sample_from_anchor is true, but speculative_tokens {proposed} is one less than the"
            f" block of {block_size}: if acceptance is low, try --no-sample-from-anchor"
        )


def _packaging_layout(draft: DraftReading) -> bool:
    name = draft.packaging.name
    family = draft.config.lookup("speculators_model_type")
    markov = W1 in draft.shapes
    dflash = name == "z-lab" or (name == "speculators" and (family == "dflash" or not markov))
    made = not dflash
    ambiguous = (name == "speculators" and markov) or (
        name == "specforge" and "DFlashDraftModel" in architectures(draft.config.tree)
    )
    if ambiguous:
        draft.warnings.append(
            "the file does not say whether the anchor's row is sampled; taken as"
            f" {str(made).lower()}: if acceptance is low, try --no-sample-from-anchor"
        )
    return bool(draft.config.record("sample_from_anchor", made, f"packaging {name}"))


def _proposed_tokens(reading: ConfigReading) -> int | None:
    methods = reading.lookup("speculators_config.proposal_methods")
    if not isinstance(methods, list):
        return None
    given = [m.get("speculative_tokens") for m in methods if isinstance(m, dict)]
    counts = [count for count in given if count is not None]
    wrong = [c for c in counts if not SIZE.holds(c)]
    if wrong:
        reading.problem(f"speculative_tokens must be {SIZE.words}, got {brief(wrong[0])}")
        return None
    return max(counts, default=None)


def read_causal(draft: DraftReading, windows: tuple[int, ...]) -> tuple[bool, ...]:
    """Return for each layer whether a row of the block sees only rows before it."""
    paths = ["is_causal", *(f"{n}.causal" for n in NESTED)]
    explicit = draft.config.find("causal", FLAG, *paths)
    if explicit is not None:
        return (bool(explicit),) * len(windows)
    if draft.packaging.name != "speculators":
        return (False,) * len(windows)
    both_ways = draft.config.find("sliding_window_non_causal", FLAG)
    return tuple(window > 0 and not both_ways for window in windows)

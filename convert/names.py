"""Name tables: which tensor of a checkpoint becomes which rows of which parameter.

The tables are data. `target_plan` and `draft_plan` expand them for one configuration; everything
else (loading, checking, counting bytes, restoring a store) walks the expanded plan.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

from convert.headers import WEIGHT_DTYPES, Tensor
from dspark_jax.config import DraftConfig, LayersConfig, TargetConfig


class Row(NamedTuple):
    """One tensor: its name, its shape in size letters, its parameter, the flag that asks for it.

    Rows with the same `into` are stacked in table order; an empty `into` keeps the name.
    """

    name: str
    shape: str
    into: str = ""
    when: str = ""


LAYER = (
    Row("input_layernorm.weight", "D"),
    Row("self_attn.q_proj.weight", "NH D", "self_attn.qkv_proj.weight"),
    Row("self_attn.k_proj.weight", "KH D", "self_attn.qkv_proj.weight"),
    Row("self_attn.v_proj.weight", "KH D", "self_attn.qkv_proj.weight"),
    Row("self_attn.q_proj.bias", "NH", "self_attn.qkv_proj.bias", "qkv_bias"),
    Row("self_attn.k_proj.bias", "KH", "self_attn.qkv_proj.bias", "qkv_bias"),
    Row("self_attn.v_proj.bias", "KH", "self_attn.qkv_proj.bias", "qkv_bias"),
    Row("self_attn.o_proj.weight", "D NH"),
    Row("self_attn.o_proj.bias", "D", when="output_bias"),
    Row("self_attn.q_norm.weight", "H", when="qk_norm"),
    Row("self_attn.k_norm.weight", "H", when="qk_norm"),
    Row("post_attention_layernorm.weight", "D"),
    Row("mlp.gate_proj.weight", "F D", "mlp.gate_up_proj.weight"),
    Row("mlp.up_proj.weight", "F D", "mlp.gate_up_proj.weight"),
    Row("mlp.down_proj.weight", "D F"),
)
# Keys and values of the context rows for every draft layer: one matrix, a copy of those rows.
CONTEXT = (
    Row("self_attn.k_proj.weight", "KH D", "context_kv.weight"),
    Row("self_attn.v_proj.weight", "KH D", "context_kv.weight"),
    Row("self_attn.k_proj.bias", "KH", "context_kv.bias", "qkv_bias"),
    Row("self_attn.v_proj.bias", "KH", "context_kv.bias", "qkv_bias"),
)
TARGET = (
    Row("embed_tokens.weight", "V D"),
    Row("norm.weight", "D"),
    Row("lm_head.weight", "V D", when="untied"),
)
DRAFT = (
    Row("embed_tokens.weight", "V D", when="own_embedding"),
    Row("lm_head.weight", "Vd D", when="own_head"),
    Row("fc.weight", "D CDt"),
    Row("hidden_norm.weight", "D"),
    Row("norm.weight", "D"),
    Row("markov_head.markov_w1.weight", "V R", when="markov"),
    Row("markov_head.markov_w2.weight", "Vd R", when="markov"),
    Row("markov_head.gate_proj.weight", "R D+R", when="gated"),
    Row("markov_head.gate_proj.bias", "R", when="gated"),
    Row("markov_head.joint_proj.weight", "3R 2R+D", when="rnn"),
    Row("markov_head.joint_proj.bias", "3R", when="rnn"),
    Row("confidence_head.proj.weight", "1 D", when="confidence_hidden"),
    Row("confidence_head.proj.weight", "1 D+R", when="confidence_markov"),
    Row("confidence_head.proj.bias", "1", when="confidence"),
    Row("d2t", "Vd", "draft_to_target", "reduced"),
)

PREFIXES = ("model.", "draft_model.", "drafter.", "dspark.", "logit_head.")
ALIASES = {
    "context_proj.weight": "fc.weight",
    "context_norm.weight": "hidden_norm.weight",
    "final_norm.weight": "norm.weight",
}
MAPS = ("d2t", "draft_to_target")  # whole numbers, not weights
VOCABULARY = ("V", "Vd")  # sizes whose rows a draft file may pad
OPTIONAL = "confidence_head.proj.bias"  # some exports train the confidence head without a bias

# Names that are read over, each with the reason that is reported.
IGNORED: tuple[tuple[str, str], ...] = (
    (r"(^|\.)t2d$", "the inverse of d2t, used in training only"),
    (r"^verifier_", "a copy of the target's tensor, used in training only"),
    (r"(^|\.)rotary_emb\.|(^|\.)inv_freq$", "rotary frequencies are computed from the config"),
    (r"^mask_embedding(\.weight)?$", "the mask id has a row in the embedding"),
    (r"^(ema|optimizer|loss)[._]", "training state"),
)


class Ignored(NamedTuple):
    """A tensor that is not used, its file, and why."""

    name: str
    file: str
    reason: str


class Piece(NamedTuple):
    """Rows of one parameter that come from one tensor; `padded` allows more rows in the file."""

    source: str
    shape: tuple[int, ...]
    padded: bool


class Parameter(NamedTuple):
    """One parameter: its shape, and the tensors that are stacked into it (none: zeros)."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


Plan = dict[str, Parameter]


def _expand(rows: Iterable[tuple[str, Row]], sizes: dict[str, int], flags: set[str]) -> Plan:
    stacked: dict[str, list[Piece]] = {}
    for prefix, row in rows:
        if row.when and row.when not in flags:
            continue
        letters = row.shape.split()
        shape = tuple(sizes[letter] for letter in letters)
        into = row.into if row.into.startswith("context_kv") else prefix + (row.into or row.name)
        piece = Piece(prefix + row.name, shape, letters[0] in VOCABULARY)
        stacked.setdefault(into, []).append(piece)
    return {
        into: Parameter((sum(p.shape[0] for p in pieces), *pieces[0].shape[1:]), tuple(pieces))
        for into, pieces in stacked.items()
    }


def _layer_rows(table: tuple[Row, ...], layers: LayersConfig) -> list[tuple[str, Row]]:
    return [(f"layers.{i}.", row) for i in range(layers.num_layers) for row in table]


def _sizes(layers: LayersConfig) -> dict[str, int]:
    heads = {"NH": layers.num_heads * layers.head_dim, "KH": layers.num_kv_heads * layers.head_dim}
    return {"D": layers.hidden_size, "F": layers.intermediate_size, "H": layers.head_dim, **heads}


def _flags(layers: LayersConfig) -> set[str]:
    return {name for name in ("qkv_bias", "output_bias", "qk_norm") if getattr(layers, name)}


def target_plan(config: TargetConfig) -> Plan:
    """Return every parameter of the target and the tensors it is made of."""
    sizes = {**_sizes(config.layers), "V": config.vocab_size}
    flags = _flags(config.layers) | (set() if config.tied else {"untied"})
    rows = [("", row) for row in TARGET] + _layer_rows(LAYER, config.layers)
    return _expand(rows, sizes, flags)


def draft_plan(config: DraftConfig) -> Plan:
    """Return every parameter of the draft and the tensors it is made of."""
    width, rank = config.layers.hidden_size, config.markov_rank
    sizes = {
        **_sizes(config.layers),
        **{"V": config.vocab_size, "Vd": config.draft_vocab_size, "1": 1, "R": rank},
        **{"CDt": len(config.taps) * config.target_hidden_size, "D+R": width + rank},
        **{"3R": 3 * rank, "2R+D": 2 * rank + width},
    }
    flags = _flags(config.layers) | {config.markov, f"confidence_{config.confidence}"}
    flags |= {"markov"} if config.markov != "none" else set()
    flags |= {"confidence"} if config.confidence != "none" else set()
    flags |= {"reduced"} if config.reduced_vocabulary else set()
    flags |= {name for name in ("own_embedding", "own_head") if getattr(config, name)}
    rows = [("", row) for row in DRAFT] + _layer_rows(LAYER, config.layers)
    return _expand(rows + _layer_rows(CONTEXT, config.layers), sizes, flags)


def canonical(name: str) -> str:
    """Return the table's name of a tensor: known prefixes stripped, known aliases replaced."""
    stripped = True
    while stripped:
        stripped = False
        for prefix in PREFIXES:
            if name.startswith(prefix):
                name, stripped = name.removeprefix(prefix), True
    return ALIASES.get(name, name)


def by_canonical_name(tensors: Iterable[Tensor], problems: list[str]) -> dict[str, Tensor]:
    """Return canonical name -> tensor; two tensors with one meaning are a problem."""
    named: dict[str, Tensor] = {}
    for tensor in tensors:
        name = canonical(tensor.name)
        if name in named:
            problems.append(f"{tensor}: duplicated, {named[name]} means the same")
        named[name] = tensor
    return named


def set_aside(named: dict[str, Tensor]) -> list[Ignored]:
    """Remove the tensors that are not used from `named` and return them with their reasons."""
    found = []
    for name in list(named):
        for pattern, reason in IGNORED:
            if re.search(pattern, name):
                tensor = named.pop(name)
                found.append(Ignored(tensor.name, tensor.file.name, reason))
                break
    return found


def weights_words(tensors: Iterable[Tensor]) -> str:
    """Return the name of the only weight file, or words for all of them."""
    files = {tensor.file.name for tensor in tensors}
    return files.pop() if len(files) == 1 else "the weight files"


def check_tensors(
    plan: Plan, named: dict[str, Tensor], problems: list[str], *, padding: bool = True
) -> list[str]:
    """Hold the tensors against the plan, both ways; return warnings on padded rows.

    Missing, unknown and wrongly shaped tensors are problems, each with its file. Without
    `padding` a vocabulary must have exactly the rows that the config names.
    """
    warnings = []
    expected = {piece.source: piece for entry in plan.values() for piece in entry.pieces}
    where = weights_words(named.values())
    for name, piece in expected.items():
        tensor = named.get(name)
        if tensor is None:
            if name != OPTIONAL:
                problems.append(f"{name}: missing from {where}")
            continue
        kinds = ("I64", "I32") if name in MAPS else WEIGHT_DTYPES
        if tensor.dtype not in kinds:
            problems.append(
                f"{tensor}: stored as {tensor.dtype}, must be one of {', '.join(kinds)}"
                + ("" if name in MAPS else "; quantised weights are not supported")
            )
        more = piece.padded and tensor.shape[1:] == piece.shape[1:] and bool(tensor.shape)
        if padding and more and tensor.shape[0] > piece.shape[0]:
            warnings.append(
                f"{tensor}: {tensor.shape[0]} rows, of which the first {piece.shape[0]} are used"
            )
        elif tensor.shape != piece.shape:
            problems.append(
                f"{tensor}: shape {list(tensor.shape)}, but the config asks for {list(piece.shape)}"
                + (f"; set vocab_size to {tensor.shape[0]}" if more and not padding else "")
            )
    problems += [f"{named[name]}: unknown tensor" for name in named if name not in expected]
    return warnings


def without_absent_bias(plan: Plan, named: dict[str, Tensor]) -> Plan:
    """Return the plan with zeros for the optional confidence bias where the file has none."""
    if OPTIONAL not in plan or OPTIONAL in named:
        return plan
    return {**plan, OPTIONAL: plan[OPTIONAL]._replace(pieces=())}

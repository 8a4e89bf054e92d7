"""Options of `load`: what each must be, and what a run cannot follow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from dspark_jax.decoding import DecodeConfig

DRAFT_OPTIONS = (
    "ceiling",
    "confidence_threshold",
    "rejection",
    "draft_sampling",
    "draft_top_k",
    "draft_truncation",
)

LOOKUP_IGNORES = ("draft_sampling", "draft_top_k", "draft_truncation")  # of DRAFT_OPTIONS
# What each option of `load` must be, and those among them that may be None.
INTEGERS = (
    *("max_length", "max_batch", "draft_top_k", "num_speculative_tokens", "prefill_chunk"),
    *("block_size", "mask_token_id", "tensor_parallel", "data_parallel"),
)
SWITCHES = ("draft_truncation", "use_generation_config", "ceiling", "sample_from_anchor")
OPTIONAL = (
    *("num_speculative_tokens", "prefill_chunk", "block_size", "mask_token_id"),
    *("sample_from_anchor", "target_layer_ids", "calibration", "costs", "mesh"),
    *("report", "progress"),
)
FILES = ("calibration", "costs")
FUNCTIONS = {
    "report": "a function that takes a line of text",
    "progress": "a function that takes the bytes loaded and the bytes in all",
}


def refuse_options(decode: DecodeConfig, names: Sequence[str], reason: str) -> None:
    """An option that a run without a draft network cannot follow is an error, not ignored."""
    for option in fields(DecodeConfig):
        if option.name in names and getattr(decode, option.name) != option.default:
            raise ValueError(f"{option.name} is set, but {reason}; leave it out")


def check_kinds(options: Mapping[str, Any]) -> None:
    """Name the first of the options of `load` that is of the wrong kind."""
    for name, value in options.items():
        if name in OPTIONAL and value is None:
            continue
        kind = None
        if name in ("target", "draft"):
            left_out = value is None or (name == "draft" and value is False)
            if not left_out and not (isinstance(value, str | Path) and str(value)):
                kind = "a folder or a hub repository id"
        elif name in FILES and not (isinstance(value, str | Path) and str(value)):
            kind = "a file"
        elif name in FUNCTIONS and not callable(value):
            kind = FUNCTIONS[name]
        elif name in INTEGERS and not _is_number(value, Integral):
            kind = "an integer"
        elif name in SWITCHES and not isinstance(value, bool):
            kind = "True or False"
        elif name == "mesh" and not isinstance(value, Mesh):
            kind = "a jax.sharding.Mesh of devices"
        elif name == "confidence_threshold" and not _is_number(value, Real):
            kind = "a number"
        elif name == "target_layer_ids" and not _are_integers(value):
            kind = "a list of integers"
        if kind:
            raise ValueError(f"{name} must be {kind}, got {value!r}")
    for name in ("max_batch", "prefill_chunk", "tensor_parallel", "data_parallel"):
        if options[name] is not None and options[name] < 1:
            raise ValueError(f"{name} must be at least 1, got {options[name]}")


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _are_integers(values: Any) -> bool:
    return isinstance(values, Iterable) and all(_is_number(one, Integral) for one in values)

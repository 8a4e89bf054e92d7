"""A request as the arrays that `decode.admit` and `decode.prefill` take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dspark_jax.request import MAX_BIAS, SamplingParams
from dspark_jax.state import MAX_STOP_IDS, RowSettings


def row_settings(
    prompt_length: int, params: SamplingParams, *, seed: int = 0, stop_ids: Sequence[int] = ()
) -> RowSettings:
    """Arrays of one request.

    `seed` (64 bits) and `stop_ids` are the ones that count: `params.seed` may be None, and
    `params.stop_token_ids` only add to a model's own. Raises ValueError for more stop tokens
    than a row can hold.
    """
    if len(stop_ids) > MAX_STOP_IDS:
        raise ValueError(f"{len(stop_ids)} stop tokens are above the limit of {MAX_STOP_IDS}")
    bias = dict(params.logit_bias or ())
    settings: dict[str, Any] = {
        "prompt_length": np.int32(prompt_length),
        "max_tokens": np.int32(params.max_tokens),
        "temperature": np.float32(0.0 if params.greedy else params.temperature),
        "top_p": np.float32(params.top_p),
        "top_k": np.int32(min(params.top_k, np.iinfo(np.int32).max)),
        "min_p": np.float32(params.min_p),
        "seed": np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32),
        "stop_ids": _padded(stop_ids, MAX_STOP_IDS, -1, np.int32),
        "min_tokens": np.int32(params.min_tokens),
        "repetition_penalty": np.float32(params.repetition_penalty),
        "presence_penalty": np.float32(params.presence_penalty),
        "frequency_penalty": np.float32(params.frequency_penalty),
        "bias_ids": _padded(list(bias), MAX_BIAS, -1, np.int32),
        "bias_values": _padded(list(bias.values()), MAX_BIAS, 0, np.float32),
    }
    return RowSettings(**settings)


def prompt_chunks(
    prompt: Sequence[int], size: int
) -> Iterator[tuple[np.ndarray, np.int32, np.bool_]]:
    """A prompt in chunks of `size` ids: padded ids, how many are real, whether it is the last."""
    for begin in range(0, len(prompt), size):
        part = prompt[begin : begin + size]
        yield (
            _padded(part, size, 0, np.int32),
            np.int32(len(part)),
            np.bool_(begin + size >= len(prompt)),
        )


def _padded(values: Sequence[float], size: int, fill: float, dtype: type[np.generic]) -> np.ndarray:
    padded = np.full(size, fill, dtype)
    padded[: len(values)] = values
    return padded

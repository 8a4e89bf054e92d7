"""Every entry point lowers for platforms that are not here: one source for all of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dspark_jax import decode
from dspark_jax.config import ModelConfig
from dspark_jax.draft import Draft
from dspark_jax.layers import abstract_params
from dspark_jax.target import Target
from tests.tiny import decoding, tiny_config

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
CONFIG = tiny_config(max_length=600, implementation="xla")


def arguments(config: ModelConfig, entry: str) -> tuple[Any, ...]:
    """Shapes of an entry point's arguments after the configuration."""
    params = {
        "target": abstract_params(Target, config.target, config.dtype),
        "draft": abstract_params(Draft, config.draft, config.dtype),
    }
    state = jax.eval_shape(partial(decode.init_state, config, 2))
    chunk = jax.ShapeDtypeStruct((config.decode.prefill_chunk,), jnp.int32)
    prompt = (jnp.int32(0), chunk, jnp.int32(3), jnp.bool_(True))
    return (params, state, *{"prefill": prompt, "decode_rounds": (jnp.int32(4),)}[entry])


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("entry", ["prefill", "decode_rounds"])
@pytest.mark.parametrize("sampled", [False, True])
def test_the_reference_path_lowers(platform: str, entry: str, sampled: bool) -> None:
    config = decoding(CONFIG, sampled=sampled)
    traced = getattr(decode, entry).trace(config, *arguments(config, entry))
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert "stablehlo.dot_general" in text
    assert "mosaic" not in text

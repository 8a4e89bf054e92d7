"""One trace an entry point, and nothing for the host to do inside a call."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dspark_jax import decode
from tests.tiny import (
    Request,
    many_rounds,
    one_round,
    quick_compilation,
    random_params,
    run,
    start,
    tiny_config,
)

ENTRIES = ("admit", "prefill", "draft_step", "verify_step", "decode_round", "decode_rounds")
CONFIG = tiny_config(max_length=400, prefill_chunk=64)


@pytest.fixture(autouse=True, scope="module")
def compile_quickly():
    with quick_compilation():
        yield


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG)


def stepwise(config, params, state):
    """A round as its two public halves."""
    state, proposal = decode.draft_step(config, params, state)
    state, output = decode.verify_step(config, params, state, proposal)
    return state, output.tokens[:, None], output.counts[:, None]


def test_one_trace_for_any_prompt_and_any_settings(params) -> None:
    for name in ENTRIES:
        getattr(decode, name).clear_cache()
    settings = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.9, "seed": 3},
        {"temperature": 0.3, "top_k": 4, "stop_ids": [1, 2]},
        {"temperature": 2.0, "min_p": 0.1, "seed": 2**40},
    ]
    for advance in (stepwise, one_round, many_rounds):
        for length, setting in zip((9, 10, 11, 300), settings, strict=True):
            request = Request([i % 60 for i in range(length)], max_tokens=4, **setting)
            run(CONFIG, params, [request], advance=advance)
    assert {name: getattr(decode, name)._cache_size() for name in ENTRIES} == dict.fromkeys(
        ENTRIES, 1
    )


def test_rounds_are_one_call_without_a_callback(params) -> None:
    state = decode.init_state(CONFIG, 2)
    compiled = decode.decode_rounds.lower(CONFIG, params, state, jnp.int32(4)).compile()
    lines = re.sub(r", metadata=\{[^}]*\}", "", compiled.as_text()).splitlines()
    operations = "\n".join(line for line in lines if " = " in line)
    assert " while(" in operations
    calls = re.findall(r'custom_call_target="([^"]*)"', operations)
    assert not [call for call in calls if "callback" in call.lower()]
    for word in ("outfeed", "infeed", "send", "recv"):
        assert f" {word}(" not in operations


def test_the_search_for_callbacks_finds_one() -> None:
    def noisy(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda _: None, x)
        return x

    text = jax.jit(noisy).lower(jnp.ones(())).compile().as_text()
    assert "callback" in "".join(re.findall(r'custom_call_target="([^"]*)"', text))


def test_no_law_of_the_vocabulary_in_the_greedy_tier(params) -> None:
    greedy = tiny_config(max_length=400, prefill_chunk=64, sampled=False)
    state = decode.init_state(greedy, 2)
    tiers = {
        config.decode.sampled: str(
            jax.make_jaxpr(decode.decode_round, static_argnums=0)(config, params, state)
        )
        for config in (greedy, CONFIG)
    }
    for word in ("random_bits", "log"):
        assert f"{word}[" in tiers[True] or f" {word} " in tiers[True]
        assert f"{word}[" not in tiers[False]
        assert f" {word} " not in tiers[False]


@pytest.mark.gpu
def test_rounds_read_nothing_back(params) -> None:
    """A CPU's arrays are the host's: only another device can show this."""

    def running() -> Any:
        state = decode.init_state(CONFIG, 2)
        for slot in range(2):
            state, _ = start(CONFIG, params, state, slot, Request([1, 2, 3], 100, temperature=1.0))
        return state

    rounds = jnp.int32(16)
    decode.decode_rounds(CONFIG, params, running(), rounds)  # compiled before the guard
    state = jax.block_until_ready(running())
    with jax.transfer_guard_device_to_host("disallow"):
        state, output = decode.decode_rounds(CONFIG, params, state, rounds)
        jax.block_until_ready(output)
        with pytest.raises(RuntimeError, match="transfer"):
            int(output.counts[0, 0, 0])
    assert int(output.counts[:, :, 0].sum()) > 0

"""Logit controls: speculative decoding equals decoding one token at a time with the same ones."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import decode
from dspark_jax.controls import adjust_block, admit_controls, init_controls, mark_prompt
from dspark_jax.drafters import NONE
from dspark_jax.request import SamplingParams
from dspark_jax.rows import row_settings
from dspark_jax.verify import verify
from tests.tiny import agreeing_params, many_rounds, quick_compilation, tiny_config

PROMPT = [3, 14, 15, 9, 2, 6, 5, 3, 5]
STOP = 60
CONTROLS = {
    "bias": {"logit_bias": {4: 3.0, 9: -100.0, 26: -100.0}},
    "repetition": {"repetition_penalty": 1.8},
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 2.0},
    "least length": {"min_tokens": 12, "logit_bias": {STOP: 50.0}},
    "all": {
        "logit_bias": {4: 1.0, STOP: 2.0},
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.4,
        "min_tokens": 5,
    },
}


@pytest.fixture(scope="module", autouse=True)
def _quick():
    with quick_compilation():
        yield


@pytest.fixture(scope="module")
def pair():
    config = tiny_config(controls=True, prefill_chunk=4, rejection="gumbel", max_length=64)
    params = agreeing_params(config)
    params["target"]["lm_head"]["weight"] *= 0.15  # margins that a penalty can overturn
    plain = replace(
        config, draft=None, decode=replace(config.decode, num_drafts=0, confidence_threshold=0.0)
    )
    return config, plain, params


def _decode(config, params, asked, temperature):
    """Tokens, acceptance lengths and tokens after each stop-free prefix of one row in slot 1."""
    asked = SamplingParams(max_tokens=48, temperature=temperature, **asked)
    state = decode.init_state(config, 2)
    row = row_settings(len(PROMPT), asked, seed=5, stop_ids=[STOP])
    state = decode.admit(config, state, jnp.int32(1), row)
    for begin in range(0, len(PROMPT), 4):
        part = PROMPT[begin : begin + 4]
        tokens = jnp.asarray(part + [0] * (4 - len(part)), jnp.int32)
        last = jnp.bool_(begin + 4 >= len(PROMPT))
        state, first = decode.prefill(
            config, params, state, jnp.int32(1), tokens, jnp.int32(len(part)), last
        )
    out, lengths = [int(first.token)], []
    while not bool(state.done.all()):
        state, tokens, counts = many_rounds(config, params, state)
        for row, (emitted, *_) in zip(np.asarray(tokens)[1], np.asarray(counts)[1], strict=True):
            out += row[:emitted].tolist()
            lengths += [int(emitted)] * bool(emitted)
    return out[:48], lengths


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", CONTROLS)
def test_speculative_equals_plain(pair, name, temperature):
    config, plain, params = pair
    tokens, lengths = _decode(config, params, CONTROLS[name], temperature)
    expected, _ = _decode(plain, {"target": params["target"]}, CONTROLS[name], temperature)
    assert tokens == expected
    assert tokens != _decode(config, params, {}, temperature)[0], "the control changed nothing"
    if name == "frequency" and temperature == 0.0:
        assert max(lengths) > 1, "no draft was accepted: the prefix of a slot was never in play"


def test_least_length_holds_the_stop_back_and_no_longer(pair):
    config, _, params = pair
    tokens, _ = _decode(config, params, CONTROLS["least length"], 0.0)
    assert tokens.index(STOP) == 12
    assert tokens[-1] == STOP


def test_a_prompt_is_marked_without_what_pads_its_chunk():
    ids, count = jnp.asarray([3, 5, 0, 0]), jnp.int32(2)
    marked = mark_prompt(init_controls(2, 9), jnp.int32(1), ids, count).in_prompt
    assert np.argwhere(marked).tolist() == [[1, 3], [1, 5]]


def test_a_slot_keeps_no_control_of_its_last_request():
    used = jax.tree.map(jnp.ones_like, init_controls(2, 61))
    row = row_settings(6, SamplingParams(**CONTROLS["all"]), stop_ids=[STOP])
    admitted = [admit_controls(one, jnp.int32(1), row) for one in (used, init_controls(2, 61))]
    for mine, fresh in zip(*map(jax.tree.leaves, admitted), strict=True):
        np.testing.assert_array_equal(mine[1], fresh[1])
        np.testing.assert_array_equal(mine[0], np.ones_like(mine[0]))


def test_log_probabilities_are_of_the_law_before_the_controls(pair):
    _, plain, _ = pair
    config = replace(plain, decode=replace(plain.decode, sampled=False, logprobs=1))
    row = row_settings(3, SamplingParams(logit_bias={7: 100.0}))
    state = decode.admit(config, decode.init_state(config, 1), jnp.int32(0), row)
    _, nothing = NONE.propose(config, {}, state)
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(1, 1, 61)), jnp.float32)
    output = verify(logits, nothing, state, config.decode)
    assert output.tokens.tolist() == [[7]]
    law = jax.nn.log_softmax(logits[0, 0])
    np.testing.assert_allclose(output.logprobs.values[0, 0], [law[7], law.max()], rtol=1e-6)


def test_each_slot_counts_the_drafts_before_it():
    """`adjust_block` against a numpy loop that decodes one token at a time."""
    rng = np.random.default_rng(0)
    batch, vocab, drafts = 3, 61, 4
    asked = [SamplingParams(**CONTROLS[name]) for name in ("all", "repetition", "bias")]
    asked[2] = replace(asked[2], logit_bias={4: 3.0, 11: -9.0})
    controls = init_controls(batch, vocab)
    in_prompt = rng.random((batch, vocab)) < 0.3
    generated = rng.integers(0, 3, (batch, vocab))
    for slot, params in enumerate(asked):
        row = row_settings(6, params, stop_ids=[STOP, 2])
        controls = admit_controls(controls, jnp.int32(slot), row)
    controls = controls.replace(
        in_prompt=jnp.asarray(in_prompt), generated=jnp.asarray(generated, jnp.int32)
    )
    logits = rng.normal(size=(batch, drafts + 1, vocab)).astype(np.float32)
    drafted = rng.integers(0, vocab, (batch, drafts))
    cached = np.array([6, 9, 8])
    stop_ids = jnp.asarray([[STOP, 2, -1]] * batch)
    actual = adjust_block(
        jnp.asarray(logits), jnp.asarray(drafted), controls, jnp.asarray(cached), stop_ids
    )
    for b, params in enumerate(asked):
        for k in range(drafts + 1):
            counts = generated[b] + np.bincount(drafted[b, :k], minlength=vocab)
            expected = logits[b, k].astype(np.float64)
            for token, value in dict(params.logit_bias or ()).items():
                expected[token] += value
            if cached[b] + 1 + k - 6 < params.min_tokens:
                expected[[STOP, 2]] = -np.inf
            seen = in_prompt[b] | (counts > 0)
            scaled = np.where(
                expected > 0,
                expected / params.repetition_penalty,
                expected * params.repetition_penalty,
            )
            expected = np.where(seen, scaled, expected)
            expected -= params.presence_penalty * (counts > 0) + params.frequency_penalty * counts
            np.testing.assert_allclose(np.asarray(actual)[b, k], expected, rtol=1e-5, atol=1e-5)

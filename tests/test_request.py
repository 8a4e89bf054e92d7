"""SamplingParams: defaults, normalised values, and one clear error for each wrong one."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from dspark_jax.request import Chunk, SamplingParams


def test_defaults_are_the_documented_ones():
    params = SamplingParams()
    shown = {name: getattr(params, name) for name in list(params.__dataclass_fields__)[:10]}
    assert shown == {
        "max_tokens": 128,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "stop": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "logprobs": None,
    }


def test_values_are_normalised_and_hashable():
    params = SamplingParams(max_tokens=np.int64(3), stop="end", stop_token_ids=[np.int32(4), 5])
    assert (params.max_tokens, params.stop, params.stop_token_ids) == (3, ("end",), (4, 5))
    assert type(params.max_tokens) is int
    params = SamplingParams(temperature=np.float32(0.5), logit_bias={np.int32(3): np.int64(2)})
    assert (params.temperature, params.logit_bias) == (0.5, ((3, 2.0),))
    assert type(params.temperature) is float
    assert hash(params) == hash(dataclasses.replace(params))


@pytest.mark.parametrize(("temperature", "greedy"), [(0.0, True), (9e-6, True), (1e-5, False)])
def test_greedy_below_the_threshold(temperature, greedy):
    assert SamplingParams(temperature=temperature).greedy is greedy


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 2.5),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("temperature", "0.5"),
        ("temperature", True),
        ("min_p", np.bool_(True)),
        ("logit_bias", {1: True}),
        ("logit_bias", {1: "2"}),
        ("logit_bias", {True: 2.0}),
        ("stop", {"end": 1}),
        ("stop", {"end"}),
        ("stop_token_ids", {3: 4}),
        ("stop_token_ids", b"ab"),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -1),
        ("min_p", -0.01),
        ("min_p", 1.5),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.5),
        ("stop", [""]),
        ("stop", [3]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("temperature", 1e39),
        ("temperature", 10**400),
        ("top_p", 1e-46),
        ("top_p", 1e-38),
        ("stop", None),
        ("stop", 3),
        ("stop_token_ids", 3),
        ("stop_token_ids", None),
        ("stop_token_ids", [99999999999]),
        ("ignore_eos", "no"),
        ("max_tokens", True),
        ("logprobs", -1),
        ("logprobs", 21),
        ("min_tokens", -1),
        ("min_tokens", 129),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: float("inf")}),
        ("logit_bias", dict.fromkeys(range(301), 1.0)),
        ("logit_bias", {5: 1e38}),
        ("logit_bias", {5: -1e39}),
        ("logit_bias", {2**31: 1.0}),
        ("logit_bias", 3),
        ("logit_bias", [1, 2]),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-50),
        ("repetition_penalty", 1e39),
        ("presence_penalty", 2.5),
        ("frequency_penalty", "much"),
    ],
)
def test_a_value_out_of_range_is_named(name, value):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


def test_the_ends_of_the_ranges_are_legal():
    for temperature in (1e-6, 1000):
        for penalty in (0.01, 100):
            SamplingParams(temperature=temperature, top_p=1e-6, repetition_penalty=penalty)
    assert SamplingParams(logit_bias={5: -1000, 6: 1000}).logit_bias == ((5, -1000.0), (6, 1000.0))


@pytest.mark.parametrize(
    ("options", "controlled"),
    [
        ({}, False),
        ({"logprobs": 20}, False),
        ({"min_tokens": 1}, True),
        ({"logit_bias": {3: 1.0}}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": -0.5}, True),
        ({"frequency_penalty": 0.5}, True),
    ],
)
def test_controls_are_known_from_what_was_asked(options, controlled):
    params = SamplingParams(**options)
    assert params.controlled is controlled
    assert hash(params) == hash(dataclasses.replace(params))


def test_an_unknown_option_raises_by_name():
    with pytest.raises(TypeError, match="beam_width"):
        SamplingParams(beam_width=4)


def test_a_chunk_joins_its_pieces():
    chunk = Chunk(token_ids=[1, 2], pieces=["a", "b"], origins=["draft", "bonus"])
    assert chunk.text == "ab"
    assert chunk.finish_reason is None


@pytest.mark.parametrize("module", ["request", "scheduler", "metrics", "text"])
def test_no_jax_is_imported(module):
    code = f"import sys, dspark_jax.{module}; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

"""The engine against an independent driver of the jitted entry points, and its own promises."""

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dspark_jax import metrics
from dspark_jax.advice import DraftAdvice
from dspark_jax.config import NgramConfig
from dspark_jax.engine import Engine
from dspark_jax.programs import Programs, Tier
from dspark_jax.request import SamplingParams
from dspark_jax.text import open_tokenizer
from tests.tiny import Request, plain_config, random_params, run_alone, tiny_config

DEMO = Path(__file__).parent.parent / "dspark_jax" / "demo" / "target"
CONFIG = tiny_config(vocab=17)
VOCABULARY = CONFIG.target.vocab_size
PARAMS = random_params(CONFIG, scale=0.15)  # mild logits: drafts are accepted now and then
SHORT = SamplingParams(max_tokens=4)
SAID = {"role": "user", "content": "hi"}
PROMPTS = [[3], [1, 2, 3, 4, 5, 6, 7, 8], [9, 8, 7], list(range(9)), [5] * 17]


@pytest.fixture(scope="module")
def engine():
    return Engine(CONFIG, PARAMS, max_batch=2, report=lambda _: None)


@pytest.fixture(scope="module")
def texts():
    """An engine with the vocabulary and the tokenizer of the embedded pair, random weights."""
    config = tiny_config(vocab=4096)
    tokenizer = open_tokenizer(DEMO)
    return Engine(config, random_params(config, scale=0.15), tokenizer, stop_ids=[0], max_batch=1)


def share_programs(owner, other):
    other._loop.programs._compiled = owner._loop.programs._compiled


def alone(prompt, params, stop_ids=()):
    request = Request(
        prompt,
        params.max_tokens,
        params.temperature,
        params.top_p,
        params.top_k,
        params.min_p,
        params.seed or 0,
        stop_ids,
    )
    return run_alone(CONFIG, PARAMS, request)


def check(result, expected):
    assert result.token_ids == expected.tokens
    assert result.acceptance_lengths == expected.acceptance_lengths
    assert result.proposal_lengths == expected.proposal_lengths


def test_a_low_acceptance_is_told_once(engine):
    told = []
    bad = random_params(CONFIG, seed=1)
    mixed = Engine(
        CONFIG, {"target": PARAMS["target"], "draft": bad["draft"]}, max_batch=2, report=told.append
    )
    share_programs(engine, mixed)
    mixed.generate([[3]], SamplingParams(max_tokens=20))
    assert told == []  # too few rounds to judge
    for _ in range(2):
        results = mixed.generate(PROMPTS, SamplingParams(max_tokens=30))
    assert metrics.acceptance_length(results) < 1.3
    assert len(told) == 1
    assert "Usual causes" in told[0]


def test_what_a_low_acceptance_is_blamed_on():
    low = SimpleNamespace(acceptance_lengths=[1] * 60)

    def told(config):
        lines = []
        DraftAdvice(config, lines.append).count(low)
        return " ".join(lines)

    assert "target_layer_ids" in told(CONFIG)
    lookup = told(replace(CONFIG, draft=NgramConfig()))
    assert "hardly helps this target" in lookup
    assert not any(word in lookup for word in ("layout", "taps", "thinking"))
    assert told(replace(CONFIG, decode=replace(CONFIG.decode, confidence_threshold=0.5))) == ""
    assert told(plain_config(CONFIG)) == ""


def test_more_prompts_than_slots_equal_their_solo_runs(engine):
    params = SamplingParams(max_tokens=12)
    results = engine.generate(PROMPTS, params)
    for prompt, result in zip(PROMPTS, results, strict=True):
        check(result, alone(prompt, params))
        assert result.prompt_tokens == len(prompt)
        assert result.finish_reason == "length"
        assert result.text == ""
        accepted = sum(result.from_draft)
        assert sum(result.accepted_drafts) >= accepted > 0 or accepted == 0
    assert any(any(result.from_draft) for result in results)


def test_rows_of_different_settings_equal_their_solo_runs(engine):
    settings = [
        SamplingParams(max_tokens=7, temperature=0.9, seed=2**63 + 5),
        SamplingParams(max_tokens=12, temperature=0.0, seed=1),
        SamplingParams(max_tokens=3, temperature=1.3, top_k=4, top_p=0.9, min_p=0.01, seed=1),
        SamplingParams(max_tokens=1, temperature=0.7, top_k=10**12, seed=3),
        SamplingParams(max_tokens=9, temperature=1e-6, seed=4),
    ]
    for prompt, params, result in zip(
        PROMPTS, settings, engine.generate(PROMPTS, settings), strict=True
    ):
        check(result, alone(prompt, replace(params, top_k=min(params.top_k, VOCABULARY))))
        assert result.seed == params.seed


def test_a_stream_joins_to_the_result(engine):
    params = SamplingParams(max_tokens=11, temperature=0.8, seed=7)
    (result,) = engine.generate([PROMPTS[3]], params)
    chunks = list(engine.stream(PROMPTS[3], params))
    assert [token for chunk in chunks for token in chunk.token_ids] == result.token_ids
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == "length"
    assert len(chunks) == 1 + len(result.acceptance_lengths)
    drafted = [origin == "draft" for chunk in chunks for origin in chunk.origins]
    assert drafted == result.from_draft


def test_plain_decoding_gives_the_greedy_tokens_of_the_pair(engine):
    plain = Engine(plain_config(CONFIG), {"target": PARAMS["target"]}, max_batch=2)
    params = SamplingParams(max_tokens=12)
    for mine, theirs in zip(
        plain.generate(PROMPTS[:2], params), engine.generate(PROMPTS[:2], params), strict=True
    ):
        assert mine.token_ids == theirs.token_ids
        assert mine.acceptance_lengths == [1] * 12
        assert mine.proposal_lengths == [0] * 12
        assert mine.from_draft == [False] * 12


def test_a_drawn_seed_is_reported_and_repeats_the_result(engine):
    params = SamplingParams(max_tokens=8, temperature=1.0)
    first, second = engine.generate([[1, 2], [1, 2]], params)
    assert first.seed != second.seed
    (again,) = engine.generate([[1, 2]], replace(params, seed=first.seed))
    assert again.token_ids == first.token_ids


def test_stop_tokens_add_to_the_models_own_and_ignore_eos_drops_only_those(engine):
    params = SamplingParams(max_tokens=12)
    tokens = engine.generate([PROMPTS[4]], params)[0].token_ids
    distinct = list(dict.fromkeys(tokens))
    own, extra = distinct[2], distinct[1]
    model = Engine(CONFIG, PARAMS, stop_ids=[own], max_batch=1)
    share_programs(engine, model)

    def output(**options):
        result = model.generate([PROMPTS[4]], replace(params, **options))[0]
        return result.token_ids, result.finish_reason

    assert output() == (tokens[: tokens.index(own) + 1], "stop")
    assert output(stop_token_ids=[extra]) == (tokens[: tokens.index(extra) + 1], "stop")
    assert output(ignore_eos=True) == (tokens, "length")
    assert output(ignore_eos=True, stop_token_ids=[extra])[1] == "stop"


def test_prompt_and_output_may_fill_max_length_exactly(engine):
    prompt = [1 + i % 15 for i in range(50)]
    params = SamplingParams(max_tokens=14)
    check(engine.generate([prompt], params)[0], alone(prompt, params))
    with pytest.raises(ValueError, match=r"50 tokens.*max_tokens 15.*65.*max_length 64"):
        engine.generate([prompt], replace(params, max_tokens=15))


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([[1], []], "prompt 1 is empty"),
        ([[1, 17]], "prompt 0 holds id 17, outside the vocabulary of 17"),
        ([[-1]], "prompt 0 holds id -1"),
        ([1, 2], "prompt 0 must be a string or a list of token ids"),
        ([[1.5]], "must be a string or a list of token ids"),
        ([[True, False]], "must be a string or a list of token ids"),
        ("text", "needs a tokenizer"),
    ],
)
def test_a_wrong_prompt_is_named(engine, prompts, words):
    with pytest.raises(ValueError, match=words):
        engine.generate(prompts, SamplingParams(max_tokens=4))


def test_other_wrong_calls_are_named(engine):
    with pytest.raises(ValueError, match="2 SamplingParams for 1 prompts"):
        engine.generate([[1]], [SamplingParams()] * 2)
    with pytest.raises(ValueError, match="stop strings needs a tokenizer"):
        engine.generate([[1]], SamplingParams(max_tokens=4, stop="x"))
    with pytest.raises(ValueError, match="65 stop tokens are above the limit of 64"):
        engine.generate([[1]], SamplingParams(max_tokens=4, stop_token_ids=range(65)))
    with pytest.raises(ValueError, match="stop_token_ids names id 17, outside the vocabulary"):
        engine.generate([[1]], SamplingParams(max_tokens=4, stop_token_ids=[17]))
    for wrong in ({"max_tokens": 3}, [None], 3):
        with pytest.raises(ValueError, match="params must be SamplingParams"):
            engine.generate([[1]], wrong)
    with pytest.raises(ValueError, match="chat needs a tokenizer"):
        engine.chat([{"role": "user", "content": "hi"}])
    with pytest.raises(ValueError, match="max_batch must be at least 1"):
        Engine(CONFIG, PARAMS, max_batch=0)
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        engine.stream([])  # at the call, not at the first chunk


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda engine: engine.generate(5), "prompts must be a string or a list of prompts, got 5"),
        (lambda engine: engine.submit(b"ab"), "must be a string or a list of token ids, got b'ab'"),
        (lambda engine: engine.submit({1, 2}), "must be a string or a list of token ids"),
        (lambda engine: engine.submit(bytearray(b"a")), "must be a string or a list of token ids"),
        (lambda engine: engine.submit(memoryview(b"a")), "must be a string or a list of token"),
        (
            lambda engine: engine.generate({"def f": 1}),
            "prompts must be a string or a list of prompts, got {'def f': 1}",
        ),
        (lambda engine: engine.generate({"def f"}), "prompts must be a string or a list of"),
        (lambda engine: engine.generate(bytearray(b"ab")), "prompts must be a string or a list"),
        (
            lambda engine: engine.submit([1], SHORT, rounds="3"),
            "rounds must be an integer, got '3'",
        ),
        (
            lambda engine: engine.submit([1], SHORT, rounds=1.5),
            "rounds must be an integer, got 1.5",
        ),
        (lambda engine: engine.cancel(None), "a request that submit gave, got None"),
        (lambda engine: engine.chat(5), "messages must be a list of .* got 5"),
        (lambda engine: engine.chat({"role": "user"}), "messages must be a list of"),
        (lambda engine: engine.chat([[]]), "messages must be a list of"),
        (lambda engine: engine.chat(""), "messages must be a list of .* got ''"),
        (lambda engine: engine.chat([{"role": "user"}]), "messages: message 0 has no content"),
        (
            lambda engine: engine.chat([[SAID], [SAID, {}]]),
            "messages: message 1 of conversation 1 has no role and no content",
        ),
        (lambda engine: engine.chat([SAID, "x"]), "message 1 must hold role and content, got 'x'"),
        (lambda engine: engine.warmup(3), "params must be SamplingParams"),
        (lambda engine: engine.warmup(batches=3), "batches must be a list, got 3"),
        (lambda engine: engine.warmup(batches=[1.5]), "a batch must be an integer, got 1.5"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(engine, call, words):
    with pytest.raises(ValueError, match=words):
        call(engine)
    assert not engine.busy


def test_numpy_ids_and_no_prompts(engine):
    prompts = (prompt for prompt in PROMPTS[:2])
    assert len(engine.generate(prompts, SamplingParams(max_tokens=4))) == 2
    params = SamplingParams(max_tokens=4)
    assert engine.generate([np.array([3])], params)[0].token_ids == (
        engine.generate([[3]], params)[0].token_ids
    )
    assert engine.generate([]) == []


def test_calls_share_the_loop_with_an_open_stream_and_closing_it_cancels(engine):
    params = SamplingParams(max_tokens=12)
    stream = engine.stream(PROMPTS[2], params)
    tokens = next(stream).token_ids
    check(engine.generate([PROMPTS[3]], params)[0], alone(PROMPTS[3], params))
    tokens += [token for chunk in stream for token in chunk.token_ids]
    assert tokens == alone(PROMPTS[2], params).tokens
    stream = engine.stream(PROMPTS[2], params)
    next(stream)
    assert engine.busy
    stream.close()
    engine.step()
    assert not engine.busy
    for _ in engine.stream(PROMPTS[2], params):
        break  # dropped and thereby closed
    check(engine.generate([PROMPTS[2]], params)[0], alone(PROMPTS[2], params))


def test_an_error_in_a_call_does_not_spoil_the_next_one(engine, monkeypatch):
    params = SamplingParams(max_tokens=12)
    with monkeypatch.context() as patch:
        patch.setattr(Programs, "run_rounds", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.generate([PROMPTS[2]], params)
    check(engine.generate([PROMPTS[2]], params)[0], alone(PROMPTS[2], params))


def test_seconds_leave_compilation_out(engine, monkeypatch):
    monkeypatch.setattr(Programs, "compile_missing", lambda *_: time.sleep(0.5) or True)
    monkeypatch.setattr(Programs, "warm_up", lambda self, tier, state: time.sleep(0.5) or state)
    (result,) = engine.generate([[3]], SamplingParams(max_tokens=4))
    assert 0 < result.seconds < 1.0


def test_only_what_is_used_is_compiled():
    small = Engine(CONFIG, PARAMS, max_batch=4)
    programs = small._loop.programs
    small.generate([[1]], SamplingParams(max_tokens=2))
    assert {(name, tier.batch) for name, tier in programs._compiled} == {
        (name, 1) for name in ("state", "controls", "admit", "prefill", "rounds", "release")
    }
    assert programs.tiers == [Tier(1, sampled=False)]
    small.generate([[1]], SamplingParams(max_tokens=2, temperature=1.0))
    assert len(programs._compiled) == 7  # sampled rounds came on top
    small.generate([[2, 3]], SamplingParams(max_tokens=4, temperature=0.3, top_p=0.5, seed=1))
    assert len(programs._compiled) == 7


@pytest.mark.parametrize(
    ("wanted", "tier"),
    [
        ([{}], Tier(1, sampled=False)),
        ([{}, {"temperature": 1.0}, {}], Tier(4)),
        ([{"presence_penalty": 1.0}], Tier(1, sampled=False, controls=True)),
        ([{"logprobs": 0}], Tier(1, sampled=False, logprobs=1)),
        ([{"logprobs": 3, "temperature": 1.0}, {}], Tier(2, logprobs=5)),
        ([{"logprobs": 20}], Tier(1, sampled=False, logprobs=20)),
    ],
)
def test_the_least_tier_that_serves_a_batch(wanted, tier):
    each = [SamplingParams(max_tokens=2, **options) for options in wanted]
    assert Tier.of(each, tier.batch) == tier
    assert tier.serves(tier)
    assert tier.least([Tier(tier.batch + 1), tier]) == tier


def test_as_rows_leave_the_cheapest_compiled_tier_goes_on():
    greedy, sampled = Tier(2, sampled=False), Tier(2)
    reporting, controlled = Tier(2, sampled=False, logprobs=5), Tier(2, controls=True, logprobs=20)
    assert greedy.least([controlled, reporting, sampled]) == sampled
    assert greedy.least([controlled, reporting]) == reporting
    assert reporting.least([sampled, greedy, controlled]) == controlled
    assert sampled.least([greedy, reporting, Tier(4)]) is None


def test_log_probabilities_do_not_depend_on_speculation(engine):
    plain = Engine(plain_config(CONFIG), {"target": PARAMS["target"]}, max_batch=2)
    params = [SamplingParams(max_tokens=9, logprobs=n) for n in (2, 0, None)]
    mine = engine.generate(PROMPTS[:3], params)
    for result, baseline, count in zip(
        mine, plain.generate(PROMPTS[:3], params), (2, 0, None), strict=True
    ):
        assert result.token_ids == baseline.token_ids
        if count is None:
            assert result.logprobs is baseline.logprobs is None
            continue
        assert len(result.logprobs) == 9
        for token, entry, other in zip(
            result.token_ids, result.logprobs, baseline.logprobs, strict=True
        ):
            assert next(iter(entry)) == token
            assert len(entry) == max(count, 1)  # greedy: the token is the likeliest itself
            assert entry == pytest.approx(other, abs=1e-5)
            assert list(entry.values()) == sorted(entry.values(), reverse=True)
    streamed = list(engine.stream(PROMPTS[0], params[0]))
    assert [entry for chunk in streamed for entry in chunk.logprobs] == mine[0].logprobs


def test_controls_reach_the_decoder(engine):
    free = SamplingParams(max_tokens=8)
    tokens = engine.generate([PROMPTS[0]], free)[0].token_ids
    forced = replace(free, logit_bias={6: 1000.0})
    assert engine.generate([PROMPTS[0]], forced)[0].token_ids == [6] * 8
    once = replace(forced, logit_bias={6: 1000.0, 7: 999.0}, presence_penalty=2.0)
    assert engine.generate([PROMPTS[0]], once)[0].token_ids[:2] == [6, 7]
    late = replace(free, stop_token_ids=tokens[:1], min_tokens=5)
    longer = engine.generate([PROMPTS[0]], late)[0].token_ids
    assert len(longer) > 5
    assert tokens[0] not in longer[:5]
    assert engine.generate([PROMPTS[0]], free)[0].token_ids == tokens  # nothing is left behind
    with pytest.raises(ValueError, match="logit_bias names id 17, outside the vocabulary of 17"):
        engine.generate([PROMPTS[0]], replace(free, logit_bias={17: 1.0}))


def test_strings_stops_and_text(texts):
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True)
    (free,) = texts.generate("def f(x):", params)
    tokenizer = texts.tokenizer
    assert free.text == tokenizer.decode(free.token_ids)
    assert free.prompt_tokens == len(tokenizer.encode("def f(x):"))
    assert "".join(chunk.text for chunk in texts.stream("def f(x):", params)) == free.text
    middle = len(free.text) // 2
    stop = free.text[middle : middle + 6]
    (cut,) = texts.generate("def f(x):", replace(params, stop=stop))
    ends = [n for n in range(41) if stop in tokenizer.decode(free.token_ids[:n])]
    assert cut.finish_reason == "stop"
    assert cut.text == free.text[: free.text.index(stop)]
    assert cut.token_ids == free.token_ids[: ends[0]]
    assert sum(cut.acceptance_lengths) + 1 == len(cut.token_ids)
    streamed = list(texts.stream("def f(x):", replace(params, stop=stop)))
    assert "".join(chunk.text for chunk in streamed) == cut.text
    assert (streamed[-1].finish_reason, texts.generate([[5]], params)[0].finish_reason) == (
        "stop",
        "length",
    )


def test_defaults_apply_where_a_call_names_no_params(texts):
    texts.defaults = SamplingParams(max_tokens=3, seed=5)
    try:
        (result,) = texts.generate([[5, 6]])
    finally:
        texts.defaults = SamplingParams()
    assert (len(result.token_ids), result.seed) == (3, 5)


def test_chat_lets_the_template_alone_add_special_tokens(texts, monkeypatch):
    seen = []
    monkeypatch.setattr(
        texts.tokenizer, "render_chat", lambda messages, thinking: f"[{messages}{thinking}]"
    )
    monkeypatch.setattr(texts, "generate", lambda prompts, params: seen.append(prompts))
    message = {"role": "user", "content": "hi"}
    texts.chat([message], SamplingParams())
    texts.chat([[message], [message]], enable_thinking=True)
    one = texts.tokenizer.encode(f"[{[message]}False]", special_tokens=False)
    two = texts.tokenizer.encode(f"[{[message]}True]", special_tokens=False)
    assert seen == [[one], [two, two]]

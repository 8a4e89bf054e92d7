"""Rounds, caps and stops as the reference counts them; cancelled, failed and timed requests."""

import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax import metrics
from dspark_jax.accounting import Clock, Request
from dspark_jax.request import SamplingParams
from dspark_jax.text import TextStream, open_tokenizer

TESTS = Path(__file__).parent
REFERENCE = json.loads((TESTS / "demo" / "reference.json").read_text())
STOPS = json.loads((TESTS / "demo" / "stops.json").read_text())
DEMO = TESTS.parent / "dspark_jax" / "demo" / "target"


@pytest.fixture(scope="module")
def demo():
    return open_tokenizer(DEMO)


def request(max_tokens=8, stop_ids=(), tokenizer=None, stop=(), prompt=(1, 2), min_tokens=0):
    params = SamplingParams(max_tokens=max_tokens, stop=stop, min_tokens=min_tokens)
    made = Request(prompt, params, 0, stop_ids, TextStream(tokenizer, stop))
    made.start()
    return made


def replay(case, made):
    """Feed a recorded run: its first token, then each round; tokens past the record are 999."""
    tokens = case["output_ids"][len(case["prompt_ids"]) :]
    made.take_first(tokens[0])
    place = 1
    rounds = list(zip(case["acceptance_lengths"], case["proposal_lengths"], strict=True))
    for number, (length, proposed) in enumerate(rounds):
        emitted = [*tokens[place : place + length], *[999] * (place + length - len(tokens))]
        inside = emitted[-1] in case["stop_token_ids"] and length == proposed
        made.take_round(
            emitted[:length], length - (not inside), proposed, number == len(rounds) - 1
        )
        place += length


@pytest.mark.parametrize("index", range(len(REFERENCE["greedy"])))
def test_recorded_runs_that_reach_the_cap(index, demo):
    case = REFERENCE["greedy"][index]
    made = request(case["max_new_tokens"], case["stop_token_ids"], demo)
    replay(case, made)
    result = made.result()
    assert result.token_ids == case["output_ids"][len(case["prompt_ids"]) :]
    assert result.finish_reason == "length"
    assert result.acceptance_lengths == case["acceptance_lengths"]
    assert result.proposal_lengths == case["proposal_lengths"]
    assert result.text == demo.decode(result.token_ids)
    assert len(result.from_draft) == len(result.token_ids)


@pytest.mark.parametrize("index", range(len(STOPS)))
def test_recorded_runs_that_meet_a_stop_token(index, demo):
    case = STOPS[index]
    made = request(case["max_new_tokens"], case["stop_token_ids"], demo)
    replay(case, made)
    result = made.result()
    assert result.token_ids[-1] in case["stop_token_ids"]
    assert result.finish_reason == "stop"
    assert result.text == demo.decode(result.token_ids[:-1])
    assert result.acceptance_lengths == case["acceptance_lengths"]
    assert result.proposal_lengths == case["proposal_lengths"]


def test_first_token_a_stop_records_no_round():
    made = request(stop_ids=[5])
    made.take_first(5)
    result = made.result()
    assert (result.token_ids, result.finish_reason) == ([5], "stop")
    assert result.acceptance_lengths == result.proposal_lengths == result.accepted_drafts == []
    assert metrics.acceptance_length([result]) is None


def test_one_token_records_one_round_of_which_nothing_is_kept():
    made = request(max_tokens=1)
    made.take_first(5)
    assert made.finish_reason is None
    made.take_round([6, 7], accepted=1, proposed=3, done=True)
    result = made.result()
    assert (result.token_ids, result.finish_reason) == ([5], "length")
    assert (result.acceptance_lengths, result.proposal_lengths) == ([2], [3])
    assert result.from_draft == [False]


def test_a_stop_past_the_cap_is_no_stop_and_one_on_it_is():
    past = request(max_tokens=2, stop_ids=[9])
    past.take_first(5)
    past.take_round([6, 9], accepted=2, proposed=2, done=True)
    assert (past.result().token_ids, past.result().finish_reason) == ([5, 6], "length")
    on = request(max_tokens=3, stop_ids=[9])
    on.take_first(5)
    on.take_round([6, 9], accepted=2, proposed=2, done=True)
    assert (on.result().token_ids, on.result().finish_reason) == ([5, 6, 9], "stop")


def test_origins():
    made = request(max_tokens=20)
    made.take_first(1)
    made.take_round([2, 3, 4], accepted=2, proposed=3, done=False)
    made.take_round([5, 6], accepted=1, proposed=1, done=False)
    made.take_round([7], accepted=0, proposed=0, done=False)
    assert made.take_chunk().origins == [
        "target",
        *("draft", "draft", "corrected"),
        *("draft", "bonus"),
        "target",
    ]
    made.take_round([8, 9], accepted=2, proposed=2, done=True)
    assert made.take_chunk().origins == ["draft", "draft"]
    assert made.result().from_draft[-2:] == [True, True]


@pytest.mark.parametrize(
    ("stop", "round_index", "lengths"),
    [
        (["a"], None, []),  # in the first token
        (["b"], 0, [1]),  # an accepted draft
        (["bc"], 0, [2]),
        (["d"], 0, [3]),  # the bonus: counted as it is
        (["cde"], 1, [3, 1]),  # across two rounds
        (["zz"], None, [3, 3]),  # never
    ],
)
def test_stop_strings_cut_text_tokens_and_the_round(demo, stop, round_index, lengths):
    ids = [demo.encode(letter)[0] for letter in "abcdefg"]
    made = request(max_tokens=7, tokenizer=demo, stop=stop)
    made.take_first(ids[0])
    for number, part in enumerate((ids[1:4], ids[4:7])):
        if made.finish_reason is None:
            made.take_round(part, accepted=2, proposed=5, done=number == 1)
    result = made.result()
    assert result.acceptance_lengths == lengths
    text = "abcdefg".split(stop[0])[0]
    assert result.text == text
    if stop == ["zz"]:
        assert result.finish_reason == "length"
        assert result.proposal_lengths == [5, 5]
        return
    assert result.finish_reason == "stop"
    assert result.token_ids == ids[: len(text) + len(stop[0])]
    inside = lengths and lengths[-1] <= 2
    assert result.proposal_lengths == [5] * (len(lengths) - 1) + (
        [] if not lengths else [lengths[-1] if inside else 5]
    )


def test_a_round_that_a_stop_string_cuts_reports_no_chance_past_it(demo):
    ids = [demo.encode(letter)[0] for letter in "abc"]
    made = request(tokenizer=demo, stop=["b"])
    made.take_first(ids[0])
    made.take_round(ids[1:], accepted=1, proposed=2, done=False, possible=[0.75, 0.5])
    assert made.result().proposal_lengths == [1]
    assert made.result().possible_acceptance == [[0.75]]


@pytest.mark.parametrize(("least", "kept"), [(1, 2), (2, 4)])
def test_a_stop_string_counts_after_the_least_length(demo, least, kept):
    ids = [demo.encode(letter)[0] for letter in "abcb"]
    made = request(tokenizer=demo, stop=["b"], min_tokens=least)
    made.take_first(ids[0])
    made.take_round(ids[1:], accepted=2, proposed=2, done=False)
    assert made.result().token_ids == ids[:kept]
    assert made.result().finish_reason == "stop"


def test_held_text_comes_out_at_the_cap(demo):
    ids = [demo.encode(letter)[0] for letter in "ab"]
    made = request(max_tokens=2, tokenizer=demo, stop=["bc"])
    made.take_first(ids[0])
    made.take_round([ids[1], 7], accepted=1, proposed=3, done=True)
    assert made.result().text == "ab"
    assert made.take_chunk().text == "ab"


@given(
    splits=st.lists(st.booleans(), min_size=1, max_size=12),
    cap=st.integers(1, 12),
)
def test_chunks_join_to_the_result(splits, cap):
    tokenizer = open_tokenizer(DEMO)
    ids = tokenizer.encode("naïve 漢字 🙂 = [1, 2]\n")
    made = request(max_tokens=cap, tokenizer=tokenizer)
    made.take_first(ids[0])
    chunks = []
    for number, told in enumerate(splits):
        last = number == len(splits) - 1
        made.take_round(ids[1 + 2 * number : 3 + 2 * number], accepted=1, proposed=3, done=last)
        if told or last:
            chunks.append(made.take_chunk())
    result = made.result()
    assert [i for chunk in chunks for i in chunk.token_ids] == result.token_ids
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == "length"


def test_log_probabilities_follow_the_tokens_that_are_kept():
    params = SamplingParams(max_tokens=3, logprobs=0)
    made = Request([1], params, 0, [], TextStream(None))
    made.start()
    made.take_first(5, [{5: -0.5}])
    made.take_round([6, 7, 8], 2, 2, True, [{6: -1.0}, {7: -2.0}, {8: -3.0}])
    assert made.result().logprobs == [{5: -0.5}, {6: -1.0}, {7: -2.0}]
    assert made.take_chunk().logprobs == [{5: -0.5}, {6: -1.0}, {7: -2.0}]
    assert request().take_chunk().logprobs is None


def test_seconds_run_from_admission_to_the_last_token():
    made = request(max_tokens=1)
    with pytest.raises(RuntimeError, match="not finished"):
        made.result()
    made.take_first(5)
    made.take_round([6], accepted=0, proposed=0, done=True)
    assert 0 < made.result().seconds < 60


def test_a_cancelled_request_keeps_what_it_has_and_takes_nothing_more():
    made = request(max_tokens=9)
    made.take_first(5)
    made.take_round([6, 7], accepted=1, proposed=3, done=False)
    made.cancel()
    made.take_round([8, 9], accepted=1, proposed=3, done=True)
    made.take_first(4)
    made.fail(ValueError("too late"))
    result = made.result()
    assert (result.token_ids, result.finish_reason) == ([5, 6, 7], "cancelled")
    assert (result.acceptance_lengths, result.proposal_lengths) == ([2], [3])
    assert made.take_chunk().finish_reason == "cancelled"
    seconds = made.seconds
    assert made.seconds == seconds


def test_one_that_has_ended_is_not_cancelled():
    made = request(stop_ids=[5])
    made.take_first(5)
    made.cancel()
    assert made.result().finish_reason == "stop"


def test_a_failed_request_raises_its_error():
    made = request()
    made.take_first(5)
    made.fail(ValueError("no such text"))
    assert made.finish_reason == made.take_chunk().finish_reason == "error"
    with pytest.raises(ValueError, match="no such text"):
        made.result()


def test_a_pause_of_the_clock_is_charged_to_nobody():
    clock = Clock()
    made = Request([1], SamplingParams(max_tokens=1), 0, (), TextStream(None))
    assert made.seconds == 0.0
    made.start(clock)
    with clock.pause():
        begin = clock()
        time.sleep(0.2)
        assert clock() == begin  # of another thread that looks meanwhile
    made.take_first(5)
    made.take_round([6], accepted=0, proposed=0, done=True)
    assert 0 < made.seconds < 0.1

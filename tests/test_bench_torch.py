"""bench compare --torch: the peers answer as the engine does, on its prompts with its weights."""

import argparse
import sys
from dataclasses import replace

import pytest
import torch
from transformers import CompileConfig

from bench.compare import PROMPTS
from bench.datasets import Conversation
from bench.entries import EngineEntry
from bench.pairs import load_drafts
from bench.serving import Generation
from bench.torch_entries import Handover, torch_entries
from bench.torch_peers import build_draft
from bench.torch_rules import loop_lacks
from dspark_jax.config import NgramConfig, RopeConfig
from dspark_jax.engine import Engine
from tests.bench_runs import bench  # noqa: F401
from tests.pairs import GOLDEN
from tests.tiny import quick_compilation, tiny_config, tiny_layers

BIASED = GOLDEN / "bias_mha" / "target"
GREEDY = ("compare", "--torch", "--temperature", 0)
COUNTS = ("acceptance_lengths", "proposal_lengths", "accepted_drafts")
TEXTS = ("text", "finish_reason", "output_tokens", "prompt_tokens", "seed", "question_id")
TALKS = [Conversation(str(index), (text,)) for index, text in enumerate(PROMPTS)]


@pytest.fixture(autouse=True, scope="module")
def compile_quickly():
    with quick_compilation():
        yield


@pytest.fixture(autouse=True)
def one_thread():
    """Threads of PyTorch wait for each other where processors are short."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def entries(bench):  # noqa: F811
    """The engine of the embedded pair as an entry, then transformers and the loop."""
    options = argparse.Namespace(
        target=None,
        dtype=None,
        max_length=240,
        implementation="auto",
        num_speculative_tokens=None,
        confidence_threshold=None,
    )
    (engine,) = load_drafts(options, ["embedded"], 1)
    own = EngineEntry(name="embedded", draft="embedded", num_drafts=7, engine=engine)
    return own, *torch_entries(options, ["embedded"], [engine])


def fields(record, names):
    return {name: getattr(record, name) for name in names}


def test_peers_stand_in_the_same_tables_with_the_same_texts(bench, tmp_path):  # noqa: F811
    html = tmp_path / "report.html"
    code, out, _, measured = bench(
        *(*GREEDY, "--num-prompts", 2, "--output-len", 32, "--repeats", 2, "--html", html),
        *("--num-speculative-tokens", 3, 7),
    )
    assert code == 0
    names = ["embedded n=3", "embedded n=7", "none", "transformers", "eager PyTorch DSpark"]
    runs = dict(zip(names, measured["runs"], strict=True))
    assert [run["name"] for run in runs.values()] == names
    texts = {tuple(record["text"] for record in run["records"]) for run in runs.values()}
    assert len(texts) == 1
    loop, plain, own = runs[names[4]], runs[names[3]], runs[names[1]]
    assert (loop["num_drafts"], plain["num_drafts"], plain["draft"]) == (7, 0, "none")
    for theirs, ours in zip(loop["records"], own["records"], strict=True):
        assert [theirs[name] for name in COUNTS] == [ours[name] for name in COUNTS]
        ends = [1]
        for length in theirs["acceptance_lengths"]:
            ends.append(min(ends[-1] + length, 32))
        assert [tokens for _, tokens in theirs["arrivals"]] == sorted(set(ends))
    for record in plain["records"]:
        assert [tokens for _, tokens in record["arrivals"]] == list(range(1, 33))
        assert record["acceptance_lengths"] == [1] * 31  # prefill brings the first token
    for run in (loop, plain):
        assert len(run["seconds"]) == 2
        for record in run["records"]:
            times = [seconds for seconds, _ in record["arrivals"]]
            assert 0 < times[0] < times[-1]
            assert times == sorted(times)
            assert record["possible_acceptance"] is None
    assert loop["figures"]["acceptance_length"] == own["figures"]["acceptance_length"]
    assert measured["environment"]["torch"].startswith(f"torch {torch.__version__} on ")
    for name in names[3:]:
        assert name in out
        assert name in html.read_text()


def test_a_stop_ends_the_peers_where_it_ends_the_engine(entries, monkeypatch):
    put, tokens_put = Handover.put, []
    monkeypatch.setattr(Handover, "put", lambda *both: (tokens_put.append(1), put(*both)))
    own, plain, loop = entries
    generation = Generation(output_len=32, temperature=0.0)
    (whole,) = own.answer(TALKS[:1], generation, 1, 0)
    ids = own.engine.generate([own.engine.tokenizer.encode(PROMPTS[0])], generation.params(0))
    tokens = ids[0].token_ids
    assert whole.text == ids[0].text
    ends = [1]
    for length in whole.acceptance_lengths:
        ends.append(ends[-1] + length)
    first_seen = [index for index, token in enumerate(tokens) if token not in tokens[:index]]
    last = {end - 1 for end in ends}
    inside = next(i for i in first_seen if i not in last and i + 1 not in last)
    bonus = next(i for i in first_seen if i in last and i)
    for place in (0, inside, bonus):
        engine = own.engine
        stopping = Engine(
            engine.config, engine.params, engine.tokenizer, (tokens[place],), max_batch=4
        )
        records = []
        for entry in (own, plain, loop):
            changed = replace(entry, engine=stopping)
            changed.warm_up(TALKS[:1], generation, 1)
            tokens_put.clear()
            records += changed.answer(TALKS[:1], generation, 1, 5)
            if entry is plain:  # nothing is decoded in vain
                assert len(tokens_put) == 1 + (place + 1)  # the prompt comes first
        assert records[0].output_tokens == place + 1
        assert records[0].finish_reason == "stop"
        assert fields(records[1], TEXTS) == fields(records[0], TEXTS)
        assert fields(records[2], TEXTS + COUNTS) == fields(records[0], TEXTS + COUNTS)


def test_one_token_and_no_stop(entries):
    for generation in (
        Generation(output_len=1, temperature=0.0),
        Generation(output_len=9, temperature=0.0, ignore_eos=True),
    ):
        records = []
        for entry in entries:
            entry.warm_up(TALKS[:1], generation, 1)
            records += entry.answer(TALKS[:1], generation, 1, 0)
        assert records[0].finish_reason == "length"
        assert fields(records[1], TEXTS) == fields(records[0], TEXTS)
        assert fields(records[2], TEXTS + COUNTS) == fields(records[0], TEXTS + COUNTS)


def test_generate_compiles_one_step_for_prompts_of_any_length(entries):
    _, plain, _ = entries
    graphs = []

    def backend(graph, inputs, **options):
        graphs.append(graph)
        return graph.forward

    compile_config = CompileConfig(backend=backend)
    compile_config._compile_all_devices = True
    plain.target.generation_config.compile_config = compile_config
    generation = Generation(output_len=12, temperature=0.0)
    plain.warm_up(TALKS, generation, 1)
    places = [layer.keys.data_ptr() for layer in plain.cache.layers]
    warm = len(graphs)
    lengths = {plain.answer([talk], generation, 1, 0)[0].prompt_tokens for talk in TALKS}
    assert len(lengths) > 1
    assert warm == len(graphs) == 1
    assert [layer.keys.data_ptr() for layer in plain.cache.layers] == places


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "compares greedy decoding alone; add --temperature 0"),
        (("--temperature", 0, "--max-concurrency", 2), "leave --max-concurrency at 1"),
        (("--temperature", 0, "--target", BIASED), "runs Qwen3 alone"),
    ],
)
def test_what_the_peers_cannot_do_is_one_sentence(bench, flags, words):  # noqa: F811
    code, out, err, _ = bench("compare", "--torch", *flags)
    assert (code, out) == (2, "")
    assert words in err
    assert err.startswith("bench compare: --torch ")
    assert len(err.splitlines()) == 1


def test_a_converted_store_is_refused_before_it_is_read(bench, tmp_path):  # noqa: F811
    (tmp_path / "dspark_store.json").write_text("{}")
    code, out, err, _ = bench(*GREEDY, "--target", tmp_path)
    assert (code, out) == (2, "")
    sentence = f"--torch cannot read the converted store {tmp_path}; give --target the folder or"
    assert err == f"bench compare: {sentence} hub id that it was made from, with its --draft\n"


@pytest.mark.parametrize("library", ["torch", "transformers"])
def test_without_the_library_one_sentence(bench, monkeypatch, library):  # noqa: F811
    monkeypatch.setitem(sys.modules, library, None)
    code, out, err, _ = bench(*GREEDY)
    assert (code, out) == (2, "")
    expected = f"--torch needs {library}, not installed here: pip install {library}"
    assert err == f"bench compare: {expected}\n"


def test_without_a_draft_for_the_loop_transformers_runs_alone(bench):  # noqa: F811
    code, _, err, measured = bench(
        *(*GREEDY, "--draft", "none", "--num-prompts", 1, "--output-len", 4, "--repeats", 1)
    )
    assert code == 0
    assert [run["name"] for run in measured["runs"]] == ["none", "transformers"]
    assert "note: eager PyTorch DSpark is left out: no draft is named\n" in err


def test_what_the_loop_lacks():
    def lacks(**changes):
        return loop_lacks(tiny_config(draft=changes).draft)

    scaled = tiny_layers(num_layers=1, rope=RopeConfig("linear", 100.0, factor=2.0))
    assert lacks() == ""
    assert lacks(causal=(True,)) == "is causal inside its block"
    assert lacks(sample_from_anchor=False) == "does not draft from the anchor"
    assert lacks(own_head=True) == lacks(own_embedding=True) != ""
    assert (
        lacks(layers=tiny_layers(num_layers=1, windows=(4,))) == "has layers that are not Qwen3's"
    )
    assert lacks(layers=scaled) == "has scaled rotary embeddings"
    assert loop_lacks(tiny_config(markov="gated").draft) == "lacks a vanilla Markov head"
    assert loop_lacks(NgramConfig()) == loop_lacks(None) == "is no network"


def test_rotary_frequencies_of_a_bfloat16_draft_stay_in_float32():
    draft = build_draft(tiny_config().draft, "bfloat16", "cpu")
    assert {weight.dtype for weight in draft.parameters()} == {torch.bfloat16}
    whole = build_draft(tiny_config().draft, "float32", "cpu")
    assert torch.equal(draft.rotary.inv_freq, whole.rotary.inv_freq)

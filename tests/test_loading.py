"""load(): the embedded pair against the reference record, and every refusal in one sentence."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from convert import store
from dspark_jax import SamplingParams, checkpoints, load, loading, metrics
from dspark_jax.loading import EMBEDDED
from dspark_jax.metrics import RoundRecord

TESTS = Path(__file__).parent
TARGET, DRAFT = EMBEDDED / "target", EMBEDDED / "draft"
REFERENCE = json.loads((TESTS / "demo" / "reference.json").read_text())
STOPS = json.loads((TESTS / "demo" / "stops.json").read_text())


@pytest.fixture(scope="module")
def engine():
    return load(max_batch=8)


def outputs(case):
    return case["output_ids"][len(case["prompt_ids"]) :]


@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_greedy_runs_of_the_reference(threshold, engine):
    cases = [c for c in REFERENCE["greedy"] if c["confidence_threshold"] == threshold]
    if threshold:
        engine = load(max_batch=8, confidence_threshold=threshold)
    params = SamplingParams(max_tokens=96)
    results = engine.generate([case["prompt"] for case in cases], params)
    for case, result in zip(cases, results, strict=True):
        assert result.prompt_tokens == len(case["prompt_ids"])
        assert result.token_ids == outputs(case)
        assert result.acceptance_lengths == case["acceptance_lengths"]
        assert result.proposal_lengths == case["proposal_lengths"]
        assert result.finish_reason == "length"
        assert result.text == engine.tokenizer.decode(result.token_ids)


def test_stops_of_the_reference(engine):
    prompts = [case["prompt"] for case in STOPS]
    params = [
        SamplingParams(
            max_tokens=case["max_new_tokens"],
            stop_token_ids=case["stop_token_ids"],
            ignore_eos=True,
        )
        for case in STOPS
    ]
    for case, result in zip(STOPS, engine.generate(prompts, params), strict=True):
        assert result.token_ids == outputs(case)
        assert result.acceptance_lengths == case["acceptance_lengths"]
        assert result.proposal_lengths == case["proposal_lengths"]
        assert result.finish_reason == "stop"
        assert result.text == engine.tokenizer.decode(result.token_ids[:-1])


def test_plain_decoding_of_the_embedded_target_gives_the_same_tokens(engine):
    plain = load(draft=False, max_batch=1)
    prompt = REFERENCE["greedy"][0]["prompt"]
    params = SamplingParams(max_tokens=40)
    (mine,), (theirs,) = plain.generate(prompt, params), engine.generate(prompt, params)
    assert mine.token_ids == theirs.token_ids
    assert mine.proposal_lengths == [0] * 40


def test_a_store_restores_the_same_parameters_and_brings_its_draft(engine, tmp_path):
    folder = tmp_path / "store"
    store.save(
        folder,
        engine.params,
        engine.config.target,
        engine.config.draft,
        token_files=TARGET,
    )
    counts = []
    restored = load(folder, max_batch=8, progress=lambda *told: counts.append(told))
    assert counts[-1] == (sum(x.nbytes for x in jax.tree.leaves(engine.params)),) * 2
    assert restored.config == engine.config
    assert restored.stop_ids == engine.stop_ids == (0,)
    jax.tree.map(np.testing.assert_array_equal, restored.params, engine.params)
    assert restored.tokenizer.encode("def f") == engine.tokenizer.encode("def f")
    plain = load(folder, draft=False)
    assert plain.config.draft is None
    assert "draft" not in plain.params
    with pytest.raises(ValueError, match="store and brings its own draft"):
        load(folder, DRAFT)
    with pytest.raises(ValueError, match=r"block_size cannot be set: .* is a converted store"):
        load(folder, block_size=7)


def test_report_names_the_run_first_and_progress_counts_bytes():
    lines, counts = [], []
    engine = load(report=lines.append, progress=lambda done, total: counts.append((done, total)))
    assert all(word in lines[0] for word in ("cpu", "float32", "xla", "memory", "weights"))
    assert counts[-1][0] == counts[-1][1] == sum(x.nbytes for x in jax.tree.leaves(engine.params))
    assert [done for done, _ in counts] == sorted(done for done, _ in counts)


def test_max_length_is_cut_to_the_models_own_limit():
    lines = []
    engine = load(max_length=10**6, max_batch=1, report=lines.append)
    assert engine.config.decode.max_length == 4096
    assert any("cut to the model's own limit, 4096" in line for line in lines)
    lines.clear()
    load(max_length=4096, max_batch=1, report=lines.append)
    assert not any("own limit" in line for line in lines)


def test_dtype_and_draft_length():
    engine = load(dtype="bfloat16", num_speculative_tokens=3, max_length=128, max_batch=1)
    assert {x.dtype.name for x in jax.tree.leaves(engine.params)} == {"bfloat16"}
    assert engine.config.decode.num_drafts == 3
    (result,) = engine.generate("import os\n", SamplingParams(max_tokens=8))
    assert set(result.proposal_lengths) == {3}


def test_what_a_file_has_wrong_can_be_settled_and_a_low_acceptance_is_told(monkeypatch):
    monkeypatch.setattr("dspark_jax.advice.LEAST_ACCEPTANCE", 3.0)  # it still drafts a little
    lines = []
    engine = load(
        sample_from_anchor=False, max_length=512, max_batch=8, report=lines.append
    )  # wrong for this pair
    assert engine.config.draft.sample_from_anchor is False
    assert engine.config.decode.num_drafts == 6
    cases = [c for c in REFERENCE["greedy"] if c["confidence_threshold"] == 0.0]
    params = SamplingParams(max_tokens=40)
    results = engine.generate([case["prompt"] for case in cases], params)
    for case, result in zip(cases, results, strict=True):
        assert result.token_ids == outputs(case)[:40]  # exact all the same
    theirs = [RoundRecord(case["acceptance_lengths"], case["proposal_lengths"]) for case in cases]
    assert metrics.acceptance_length(results) < 0.8 * metrics.acceptance_length(theirs)
    told = [line for line in lines if line.startswith("warning: the acceptance length")]
    assert len(told) == 1
    assert "sample_from_anchor" in told[0]
    engine.generate([case["prompt"] for case in cases], params)
    assert len([line for line in lines if "acceptance length" in line]) == 1


@pytest.fixture
def copied(tmp_path):
    shutil.copytree(TARGET, tmp_path / "target")
    return tmp_path / "target"


def test_a_folder_without_a_tokenizer_loads_and_takes_ids(copied):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copied / name).unlink()
    lines = []
    engine = load(copied, report=lines.append, max_batch=1)
    assert any("no tokenizer" in line for line in lines)
    (result,) = engine.generate([[5, 6]], SamplingParams(max_tokens=2))
    assert (result.text, len(result.token_ids)) == ("", 2)
    with pytest.raises(ValueError, match="needs a tokenizer"):
        engine.generate("text")


def set_generation_config(folder, **settings):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 7], **settings}))


def test_sampling_defaults_of_the_checkpoint(copied):
    set_generation_config(copied, do_sample=True, top_p=0.95, top_k=20, repetition_penalty=1.0)
    lines = []
    engine = load(copied, report=lines.append, max_batch=1)
    assert engine.defaults == SamplingParams()
    assert engine.stop_ids == (0, 7)
    assert any("temperature 1.0, top_p 0.95, top_k 20, which is not used" in x for x in lines)
    engine = load(copied, use_generation_config=True, max_batch=1)
    assert engine.defaults == SamplingParams(temperature=1.0, top_p=0.95, top_k=20)
    set_generation_config(copied, top_p=0.95)  # without do_sample it changes nothing
    lines.clear()
    load(copied, report=lines.append, max_batch=1)
    assert not any("top_p" in line for line in lines)
    set_generation_config(copied, do_sample=True, temperature=0.6, repetition_penalty=1.1)
    engine = load(copied, use_generation_config=True, max_batch=1)
    assert engine.defaults == SamplingParams(temperature=0.6, repetition_penalty=1.1)
    set_generation_config(copied, do_sample=True, typical_p=0.9)
    with pytest.raises(ValueError, match="typical_p"):
        load(copied, use_generation_config=True, max_batch=1)
    set_generation_config(copied, do_sample=True, top_k=-1)
    with pytest.raises(ValueError, match=r"generation_config\.json: top_k cannot be negative"):
        load(copied, use_generation_config=True, max_batch=1)
    (copied / "generation_config.json").write_text("[]")
    with pytest.raises(ValueError, match="generation_config"):
        load(copied, max_batch=1)


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((None, DRAFT), {}, "has no target; name its target too"),
        (("/no/such/folder",), {}, "/no/such/folder.*no such folder"),
        ((TARGET, "/no/such/draft"), {}, "/no/such/draft.*no such folder"),
        ((DRAFT,), {}, "draft"),
        ((TARGET, TARGET), {}, "draft"),
        ((), {"max_length": 1}, "max_length must be at least 2"),
        ((), {"max_batch": 0}, "max_batch must be at least 1"),
        ((), {"confidence_threshold": 1.5}, "confidence_threshold must be within 0 and 1"),
        ((), {"num_speculative_tokens": 8}, "num_speculative_tokens 8 .* trained block's 7"),
        ((), {"num_speculative_tokens": 0}, "num_speculative_tokens 0 is not within 1"),
        ((None, "ngram"), {"num_speculative_tokens": 0}, "num_speculative_tokens must be at"),
        ((None, "ngram"), {"draft_top_k": 4}, "draft_top_k is set, but .* prompt lookup"),
        ((None, "ngram"), {"draft_truncation": True}, "draft_truncation is .* prompt lookup"),
        ((None, "ngram"), {"draft_sampling": "greedy"}, "draft_sampling is .* prompt lookup"),
        ((None, ""), {}, "draft must be a folder or a hub repository id, got ''"),
        (("",), {}, "target must be a folder or a hub repository id, got ''"),
        ((3,), {}, "target must be a folder or a hub repository id, got 3"),
        ((None, True), {}, "draft must be a folder"),
        ((), {"dtype": ""}, "dtype must be float32 or bfloat16"),
        ((), {"prefill_chunk": 0}, "prefill_chunk must be at least 1, got 0"),
        ((), {"report": 1}, "report must be a function that takes a line of text, got 1"),
        ((), {"progress": 1}, "progress must be a function that takes the bytes loaded"),
        ((), {"max_batch": 1.5}, "max_batch must be an integer, got 1.5"),
        ((), {"max_batch": None}, "max_batch must be an integer"),
        ((), {"max_length": 12.5}, "max_length must be an integer"),
        ((), {"num_speculative_tokens": True}, "num_speculative_tokens must be an integer"),
        ((), {"draft_top_k": 1.5}, "draft_top_k must be an integer"),
        ((), {"block_size": 2.5}, "block_size must be an integer"),
        ((), {"block_size": "7"}, "block_size must be an integer, got '7'"),
        ((), {"draft_truncation": "no"}, "draft_truncation must be True or False, got 'no'"),
        ((), {"sample_from_anchor": "no"}, "sample_from_anchor must be True or False"),
        ((), {"confidence_threshold": "a"}, "confidence_threshold must be a number, got 'a'"),
        ((), {"target_layer_ids": 3}, "target_layer_ids must be a list of integers, got 3"),
        ((), {"target_layer_ids": "1,3"}, "target_layer_ids must be a list of integers"),
        ((), {"implementation": "pallas"}, "9.0.*found cpu"),
        ((), {"implementation": "cuda"}, "implementation must be one of"),
        ((), {"dtype": "float16"}, "dtype must be float32 or bfloat16, got 'float16'"),
        ((), {"rejection": "tree"}, "rejection must be one of"),
        ((), {"draft_sampling": "beam"}, "draft_sampling must be one of"),
        ((None, False), {"mask_token_id": 3}, "mask_token_id cannot be set: there is no draft"),
        ((), {"block_size": 9, "mask_token_id": 10**9}, "mask_token_id"),
        ((), {"target_layer_ids": [1, 3]}, "2 taps"),
        ((None, False), {"confidence_threshold": 0.5}, "confidence_threshold.*there is no draft"),
        ((None, False), {"draft_top_k": 4}, "draft_top_k.*there is no draft"),
        ((None, False), {"num_speculative_tokens": 2}, "num_speculative_tokens.*there is no draft"),
    ],
)
def test_a_wrong_call_is_one_sentence(arguments, options, words):
    with pytest.raises(ValueError, match=words):
        load(*arguments, **options)


def test_a_threshold_without_a_confidence_head_is_refused():
    golden = TESTS / "golden" / "no_markov"
    config = json.loads((golden / "draft" / "config.json").read_text())
    assert config["enable_confidence_head"] is False
    with pytest.raises(ValueError, match="no confidence head"):
        load(golden / "target", golden / "draft", confidence_threshold=0.5)


def test_too_little_memory_is_told_before_any_weight_is_read(monkeypatch):
    monkeypatch.setattr(loading, "free_memory", lambda device: 150_000_000)
    monkeypatch.setattr(checkpoints.apply, "load_target_params", lambda *_: pytest.fail("was read"))
    with pytest.raises(ValueError, match=r"free; max_length \d+ is the largest that fits"):
        load(max_batch=8)


def test_public_names_survive_their_modules():
    import dspark_jax.loading

    assert dspark_jax.load is load
    assert callable(dspark_jax.load)
    with pytest.raises(AttributeError, match="no_such_name"):
        dspark_jax.no_such_name  # noqa: B018


STRANGER = "raise SystemExit('a stranger ran')\n"


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("convert", "from dspark_jax import load"),
        ("convert", "import dspark_jax.loading"),
        ("convert", "from dspark_jax.commands import convert as c; raise SystemExit(c())"),
        ("bench", "from dspark_jax.commands import bench as b; raise SystemExit(b())"),
        ("pallas_kernels", "import dspark_jax"),
    ],
)
@pytest.mark.parametrize("package", [False, True])
def test_a_strangers_file_is_named_and_never_run(name, code, package, tmp_path):
    place = tmp_path / name / "__init__.py" if package else tmp_path / f"{name}.py"
    place.parent.mkdir(exist_ok=True)
    place.write_text(STRANGER)
    paths = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(TESTS.parent)!r}]; "
    done = subprocess.run(
        [sys.executable, "-c", paths + code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "a stranger ran" not in done.stderr
    assert str(place) in done.stderr
    assert "rename" in done.stderr


def test_a_strangers_bench_does_not_disturb_loading(tmp_path):
    (tmp_path / "bench.py").write_text(STRANGER)
    paths = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(TESTS.parent)!r}]; "
    subprocess.run([sys.executable, "-c", paths + "from dspark_jax import load"], check=True)

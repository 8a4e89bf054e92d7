"""Modes of verification through `load` and the command line, measured costs and their file."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from bench.__main__ import main as bench_main
from convert.hub import resolve_folder
from dspark_jax import costs, load
from dspark_jax.calibration import read_calibration, save_calibration
from dspark_jax.engine import Engine
from dspark_jax.generate import main
from dspark_jax.tiers import BatchCosts, costs_between, modelled_costs, verified_tiers
from dspark_jax.verification import Verification
from tests import tiny

PROMPT = "def fibonacci(n):\n"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """No costs of this machine's user."""
    monkeypatch.setattr(costs, "FOLDER", tmp_path / "cache")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"verification": "never"}, "verification must be one of"),
        ({"verification": "threshold"}, "needs a confidence_threshold above 0"),
        ({"verification": "fixed", "confidence_threshold": 0.5}, "leave one out"),
        ({"verification": "scheduled", "confidence_threshold": 0.5}, "leave one out"),
        ({"verification": "scheduled", "draft": False}, "there is no confidence head"),
        ({"verification": "scheduled", "draft": "ngram"}, "name a draft that has one, or use"),
        ({"verification": "scheduled", "costs": "/no/such"}, "/no/such cannot be read"),
        ({"costs": "file"}, "costs are for verification 'scheduled'"),
        ({"calibration": "file"}, "does nothing where all drafts are verified"),
        ({"calibration": 3, "confidence_threshold": 0.5}, "calibration must be a file, got 3"),
        ({"calibration": "/no/such", "confidence_threshold": 0.5}, "/no/such cannot be read"),
    ],
)
def test_what_does_not_go_together_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        load(max_length=64, **options)


def test_another_device_without_costs_is_told_what_to_do(monkeypatch):
    class Accelerator:
        platform, device_kind = "gpu", "NVIDIA H200"

    monkeypatch.setattr("dspark_jax.verification.default_device", Accelerator)
    with pytest.raises(ValueError, match=r"on NVIDIA H200.*python -m bench costs --max-length 64 "):
        load(verification="scheduled", max_length=64)


class Loaded(Exception):
    """In the place of an engine."""


def test_the_command_that_is_advised_measures_for_the_file_that_is_missed(tmp_path, monkeypatch):
    config = tiny.tiny_config(num_drafts=2, max_length=48, implementation="xla")
    config = replace(config, dtype="bfloat16")
    path = costs.save_costs([modelled_costs(1, 3)], config, tmp_path)
    monkeypatch.setattr(costs, "FOLDER", tmp_path)
    with pytest.raises(ValueError, match="no batch of 16 rows") as refused:
        Verification("scheduled", costs=path).settle(config, [1, 16], None, None, print)
    command = re.search(r"python -m bench (costs( --[\w-]+ \w+)*)", str(refused.value))
    given = {}

    def loaded(target, draft, **options):
        given.update(options)
        raise Loaded

    monkeypatch.setattr("bench.pairs.load", loaded)
    monkeypatch.setattr("bench.pairs.set_up_jax", list)
    with pytest.raises(Loaded):
        bench_main(command[1].split())
    decoding = {"num_drafts": given["num_speculative_tokens"], "max_length": given["max_length"]}
    again = tiny.tiny_config(implementation=given["implementation"], **decoding)
    assert costs.costs_path(tmp_path, replace(again, dtype=given["dtype"])) == path
    assert given["max_batch"] == 16


def test_what_the_defaults_measure_is_advised_without_flags():
    for length in (512, 4096):  # of the target of 512 tokens, and of one of any length
        config = tiny.tiny_config(max_length=length)
        assert costs.measuring(config).startswith("python -m bench costs with ")


def test_modes_on_the_command_line(capsys):
    assert main(["--verification", "threshold", "--max-tokens", "4"]) == 2
    assert "needs a confidence_threshold" in capsys.readouterr().err
    arguments = ("--max-tokens", "8", "--max-length", "64", "--prompt", PROMPT)
    assert main(["--verification", "scheduled", *arguments]) == 0
    assert "a model of them is used" in capsys.readouterr().err


@pytest.fixture(scope="module")
def tiny_engine():
    config = tiny.tiny_config(max_length=64, prefill_chunk=8)
    return Engine(config, tiny.random_params(config), max_batch=2)


def test_costs_are_measured_kept_and_found(tiny_engine, tmp_path):
    seen = []
    with tiny.quick_compilation():
        path = tiny_engine.profile_costs(seen.append)
    assert path.parent == tmp_path / "cache"
    config = tiny_engine.config
    assert costs.find_costs(config) == path
    table = costs.read_costs(path, config)
    assert list(table) == seen
    assert [(one.batch, one.sampled) for one in table] == [
        (batch, sampled) for batch in (1, 2) for sampled in (False, True)
    ]
    for one in table:
        assert one.tokens == verified_tiers(one.batch, config.decode.step_rows)
        assert min(one.plain, *one.rounds) > 0
    assert costs.save_costs(table, config, tmp_path).parent == tmp_path
    assert costs.find_costs(config, tmp_path).parent == tmp_path
    assert costs.save_costs(table, config, tmp_path / "missing") == path


def test_costs_of_something_else_are_refused(tiny_engine, tmp_path):
    config = tiny_engine.config
    path = costs.save_costs([modelled_costs(2, config.decode.step_rows)], config, tmp_path)
    tree = json.loads(path.read_text())
    for change, words in (
        ({"version": 0}, f"version 0, this program reads {costs.VERSION}"),
        ({"version": "3"}, f"version '3', this program reads {costs.VERSION}"),
        ({"made_for": tree["made_for"] | {"device": "TPU"}}, "measured for device 'TPU'"),
        ({"costs": None}, "no cost table"),
        ({"costs": [{"batch": 1}]}, "no cost table, 'tokens' is missing"),
        ({"costs": [5]}, "no cost table;"),
        ({"costs": [tree["costs"][0] | {"sampled": "yes"}]}, "sampled must be true, false or null"),
        ({"costs": [tree["costs"][0] | {"sampled": 5}]}, "sampled must be true, false or null"),
        ({"costs": tree["costs"] * 2}, "batch 2 is there twice"),
        ({"costs": [*tree["costs"], tree["costs"][0] | {"sampled": True}]}, "is there twice"),
        ({"costs": [tree["costs"][0] | {"plain": 1e-300}]}, "every cost must be above 0"),
        ({"costs": [tree["costs"][0] | {"rounds": [1e300] * 3}]}, "every cost must be above 0"),
        ({"costs": [tree["costs"][0] | {"plain": -1}]}, "every cost must be above 0"),
        ({"costs": [tree["costs"][0] | {"plain": True}]}, "every cost must be above 0"),
        ({"costs": [tree["costs"][0] | {"batch": 1}]}, "batch 1 ends at 10 tokens, not 5"),
    ):
        path.write_text(json.dumps(tree | change))
        with pytest.raises(ValueError, match=rf"{path.name}.*{words}.*profile_costs"):
            costs.read_costs(path, config)
    huge = {"costs": [tree["costs"][0] | {"plain": 10**400}]}
    halves = {"costs": [tree["costs"][0] | {"tokens": [4.0, 6.0, 8.0, 10.0]}]}
    for text, words in (
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "holds no JSON object"),
        (json.dumps(tree | huge), "every cost must be above 0"),
        (json.dumps(tree | halves), "whole numbers"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"{path.name}.*{words}.*profile_costs"):
            costs.read_costs(path, config)


def test_what_was_measured_later_joins_what_was_before(tiny_engine, tmp_path):
    config, store = tiny_engine.config, tmp_path / "store"
    store.mkdir()
    one, two = (modelled_costs(batch, config.decode.step_rows) for batch in (1, 2))
    path = costs.save_costs([one, two], config, store)
    dearer = replace(one, plain=2 * one.plain)
    assert costs.save_costs([dearer], config, store) == path
    assert costs.read_costs(path, config) == (dearer, two)
    later = costs.save_costs([one], config)  # into the cache, as where a store takes no files
    assert costs.find_costs(config, store) == later


def test_more_rows_than_were_measured_go_by_a_model(tiny_engine, tmp_path):
    """As where none were measured; a file that was named is another matter."""
    config = tiny_engine.config
    costs.save_costs([modelled_costs(1, config.decode.step_rows)], config, tmp_path)
    notes: list[str] = []
    settled = Verification("scheduled").settle(config, [1, 2], tmp_path, None, notes.append)
    assert notes == ["note: no costs of 2 rows were measured here, so a model of them is used"]
    assert [one.batch for one in settled.decode.costs] == [1, 2]
    path = costs.find_costs(config, tmp_path)
    named = Verification("scheduled", costs=path)
    with pytest.raises(ValueError, match=rf"{path.name}: no batch of 2 rows.*--max-batch 16 "):
        named.settle(config, [1, 2, 4, 8, 16], tmp_path, None, notes.append)


def test_what_costs_differently_has_a_file_of_its_own(tmp_path):
    config = tiny.tiny_config()
    others = (
        tiny.tiny_config(num_drafts=2),
        tiny.tiny_config(vocab=30),
        tiny.tiny_config(max_length=40),  # measured over fewer rows
        replace(config, dtype="bfloat16"),
    )
    paths = [costs.costs_path(tmp_path, one) for one in (config, *others)]
    assert len(set(paths)) == len(paths)
    assert costs.costs_path(tmp_path, tiny.tiny_config(rejection="gumbel")) == paths[0]


def test_a_batch_between_two_takes_costs_between_theirs():
    two = BatchCosts(2, 4.0, (4, 8, 12, 16), (5.0, 6.0, 7.0, 8.0), sampled=False)
    four = BatchCosts(4, 6.0, (8, 16, 32), (7.0, 10.0, 20.0), sampled=False)
    three = costs_between((two, four), 3, False)
    assert three == BatchCosts(3, 5.0, (6, 12, 18, 24), (6.0, 8.0, 11.0, 14.0), sampled=False)
    assert costs_between((two, four), 4, False) is four
    for batch, sampled in ((1, False), (5, False), (3, True)):
        with pytest.raises(ValueError, match=f"no batch of {batch} rows"):
            costs_between((two, four), batch, sampled)


def test_the_command_measures_and_says_where_it_is_kept(tiny_engine, monkeypatch, tmp_path, capsys):
    found = [BatchCosts(2, 4.0, (4, 10), (5.0, 6.0), sampled=sampled) for sampled in (False, True)]

    def measured(config, params, max_batch, progress, mesh):
        for one in found:
            progress(one)
        return found

    monkeypatch.setattr("bench.costs.load_drafts", lambda *_, **__: [tiny_engine])
    monkeypatch.setattr("dspark_jax.engine.measure_costs", measured)
    assert bench_main(["costs", "--max-batch", "2"]) == 0
    shown = capsys.readouterr()
    assert "4: 5, 10: 6" in shown.out
    assert f"kept in {tmp_path}" in shown.err
    assert costs.read_costs(costs.find_costs(tiny_engine.config), tiny_engine.config) == (*found,)


def test_a_name_that_is_empty_is_not_the_embedded_pair(capsys):
    for flag, words in (("--draft", "got ''"), ("--target", "--target is empty")):
        assert bench_main(["costs", flag, ""]) == 2
        assert words in capsys.readouterr().err


def test_engines_that_cannot_schedule_are_not_measured():
    config = tiny.tiny_config(markov="none", confidence="none", max_length=64)
    engine = Engine(config, tiny.random_params(config), max_batch=1)
    with pytest.raises(ValueError, match="the draft has no confidence head"):
        engine.profile_costs()


def test_temperatures_come_back_and_act(tiny_engine, tmp_path):
    config, path = tiny_engine.config, tmp_path / "calibration.json"
    save_calibration(path, config, [1.5, 0.5, 2, 1], ece=0.01)
    assert read_calibration(path, config) == (1.5, 0.5, 2.0, 1.0)
    other = tiny.tiny_config(vocab=30)
    with pytest.raises(ValueError, match="of a pair of other shapes"):
        read_calibration(path, other)
    tree = json.loads(path.read_text())
    number = "float32 numbers above 0"
    for text, words in (
        ("[]", "no JSON object"),
        ("[" * 100_000, "is not JSON"),
        ('{"version": "1"}', "version '1', this program reads 1"),
        *(
            (json.dumps(tree | {"temperatures": found}), words)
            for found, words in (
                ([], "0 temperatures are too few for 4 drafts"),
                ([1.0] * 3, "3 temperatures are too few"),
                ("1111", number),
                (None, number),
                ([1.0, 1.0, 1.0, True], number),
                ([1e-300] * 4, number),
                ([1e300] * 4, number),
                ([1.0, 1.0, 0, 1.0], number),
                ([1.0, -1.0, 1.0, 1.0], number),
                ([float("nan")] * 4, number),
                ([10**400] * 4, number),
            )
        ),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"calibration\.json.*{words}.*bench calibrate"):
            read_calibration(path, config)


def test_a_home_folder_is_written_out_or_named(tiny_engine, tmp_path, monkeypatch):
    config = tiny_engine.config
    monkeypatch.setenv("HOME", str(tmp_path))
    save_calibration("~/calibration.json", config, [1.0] * 4)
    assert read_calibration("~/calibration.json", config) == (1.0,) * 4
    nobody = "~nouser_x/foo"
    for read in (
        lambda: read_calibration(nobody, config),
        lambda: costs.read_costs(nobody, config),
        lambda: resolve_folder(nobody),
    ):
        with pytest.raises(ValueError, match=f"{nobody}: there is no such home folder"):
            read()

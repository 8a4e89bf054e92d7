"""bench speed end to end on the embedded pair: sets, turns, concurrency, records, mistakes."""

from pathlib import Path

import pytest

from bench.__main__ import main
from bench.records import read_measurement
from dspark_jax import SamplingParams, metrics
from tests.bench_runs import bench, embedded_engine  # noqa: F401
from tests.test_bench_datasets import CATEGORIES, speed_folder  # noqa: F401

EVAL = Path(__file__).parent / "eval"


def records(measured, run=0):
    return measured["runs"][run]["records"]


@pytest.mark.parametrize("name", ["gsm8k", "humaneval", "mbpp", "mt-bench"])
def test_the_evaluation_sets(bench, name):  # noqa: F811
    code, out, _, measured = bench(
        "speed", "--dataset", EVAL / f"{name}.jsonl", "--output-len", 5, "--num-prompts", 2
    )
    assert code == 0
    assert "acceptance by position" in out
    turns = 2 if name == "mt-bench" else 1
    assert [record["turn"] for record in records(measured)] == [
        t for t in range(turns) for _ in "ab"
    ]
    for record in records(measured):
        assert record["output_tokens"] == 5 or record["finish_reason"] == "stop"
        assert record["arrivals"][-1][1] == record["output_tokens"]
        times = [seconds for seconds, _ in record["arrivals"]]
        assert times == sorted(times)
        assert times[0] > 0


def test_speed_bench_by_category_and_subset(bench, speed_folder):  # noqa: F811
    code, out, _, measured = bench(
        *("speed", "--dataset", speed_folder, "--subset", "qualitative", "throughput_1k"),
        *("--output-len", 2, "--max-concurrency", 2, "--disable-shuffle"),
    )
    assert code == 0
    found = measured["runs"][0]["figures"]
    assert tuple(found["by_category"]) == tuple(
        sorted((*CATEGORIES, "low_entropy", "mixed", "high_entropy"))
    )
    assert found["by_subset"]["throughput_1k"]["requests"] == 3
    assert found["by_category"]["math"]["requests"] == 3  # one row of one turn, one of two
    assert "by category" in out
    assert "throughput_1k" in out


def test_histories_are_live_and_the_records_tell_all(bench, tmp_path):  # noqa: F811
    (tmp_path / "two.jsonl").write_text(
        '{"turns": ["def f(x):", "def g(x):"]}\n{"turns": ["x ="]}\n'
    )
    code, _, _, measured = bench(
        *("speed", "--dataset", tmp_path / "two.jsonl", "--disable-shuffle", "--seed", 3),
        *("--output-len", 6, "--max-concurrency", 1, 2),
    )
    assert code == 0
    alone, together = records(measured), records(measured, 1)
    assert [r["text"] for r in alone] == [r["text"] for r in together]  # a batch changes nothing
    ends = [record["sent"] + record["arrivals"][-1][0] for record in alone]
    assert all(r["sent"] >= end for r, end in zip(alone[1:], ends, strict=False))
    (one, two, later), first_end = [r["sent"] for r in together], together[0]["arrivals"][-1][0]
    assert max(one, two) < first_end <= later
    first, _, second = alone
    engine = embedded_engine()
    asked = SamplingParams(max_tokens=6, temperature=1.0, seed=3)
    (result,) = engine.generate("def f(x):", asked)
    assert first["text"] == result.text
    assert first["acceptance_lengths"] == result.acceptance_lengths
    (result,) = engine.generate(f"def f(x):\n\n{first['text']}\n\ndef g(x):", asked)
    assert second["text"] == result.text
    found = measured["runs"][0]["figures"]
    again = read_measurement(tmp_path / "measured.json").runs[0]
    assert found["acceptance_length"] == metrics.acceptance_length(again.records)
    assert found["rounds"] == sum(len(record["acceptance_lengths"]) for record in alone)
    latency = found["latency"]
    assert latency["seconds"] == ends[-1]
    assert latency["tokens_per_second"] == pytest.approx(
        sum(record["output_tokens"] for record in alone) / ends[-1]
    )


def test_ignore_eos_and_plain_decoding(bench, tmp_path):  # noqa: F811
    (tmp_path / "one.txt").write_text("import os\n")
    code, _, _, measured = bench(
        *("speed", "--dataset", tmp_path / "one.txt", "--draft", "none", "--temperature", 0),
        *("--output-len", 4, "--ignore-eos"),
    )
    assert code == 0
    (record,) = records(measured)
    assert record["acceptance_lengths"] == [1] * 4
    assert record["finish_reason"] == "length"
    assert measured["settings"]["ignore_eos"]


def test_a_turn_without_room_is_left_out_and_counted(bench, tmp_path):  # noqa: F811
    long = "import os\\n" * 150
    (tmp_path / "a.jsonl").write_text(f'{{"turns": ["x", "{long}"]}}\n{{"turns": ["{long}"]}}\n')
    arguments = (
        *("speed", "--dataset", tmp_path / "a.jsonl"),
        *("--output-len", 4, "--disable-shuffle"),
    )
    code, _, err, _ = bench(*arguments)
    assert code == 2
    assert "prompt 1 with its output takes" in err
    assert "--drop-long" in err
    code, _, err, measured = bench(*arguments, "--drop-long")
    assert code == 0
    assert "1 prompts above --max-length are left out" in err
    assert "1 later turns left no room" in err
    assert measured["runs"][0]["left_out"] == 1
    assert len(records(measured)) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "name the prompts"),
        (("--dataset", "/no/such"), "no such file or folder"),
        (("--dataset", EVAL / "mbpp.jsonl", "--category", "x"), "no category x"),
        (("--dataset", EVAL / "mbpp.jsonl", "--temperature", -1), "temperature cannot be negative"),
        (("--dataset", EVAL / "mbpp.jsonl", "--rounds-per-call", 99), "at most 16"),
        (("--dataset", EVAL / "mbpp.jsonl", "--draft", "/no/such"), "/no/such"),
        (("--dataset", EVAL / "mbpp.jsonl", "--target", "x", "--draft", "embedded"), "no draft"),
        (("--dataset", EVAL / "mbpp.jsonl", "--html", "/no/such/x.html"), "folder does not exist"),
        (
            *(
                (
                    "--dataset",
                    EVAL / "mbpp.jsonl",
                    "--draft",
                    "none",
                    "--confidence-threshold",
                    0.5,
                ),
            ),
            "there is no draft",
        ),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(bench, arguments, words):  # noqa: F811
    code, out, err, _ = bench("speed", *arguments)
    assert (code, out) == (2, "")
    (line,) = [line for line in err.splitlines() if line.startswith("bench speed: ")]
    assert words in line
    assert "Traceback" not in err


def test_a_diagram_that_is_none_is_refused_before_the_run(bench, tmp_path):  # noqa: F811
    path = tmp_path / "calibration.json"
    path.write_text('{"reliability": 5}')
    code, _, err, _ = bench("speed", "--dataset", EVAL / "mbpp.jsonl", "--calibration", path)
    assert code == 2
    (line,) = err.splitlines()
    assert f"calibration {path}: reliability cannot be 5; fit temperatures" in line


def test_unknown_commands_and_help(capsys):
    assert main(["nothing"]) == 2
    assert "unknown command 'nothing'" in capsys.readouterr().err
    assert main([]) == 2
    assert main(["--help"]) == 0
    assert "speed" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main(["speed", "--max-concurrency", "none"])
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert "must be a whole number" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "library", "remedy"),
    [
        ("report", "matplotlib", "'dspark-jax[bench]'"),
        ("calibrate", "sklearn", "'dspark-jax[bench]'"),
    ],
)
def test_a_missing_library_is_named_with_its_remedy(command, library, remedy, monkeypatch, capsys):
    def missing(_):
        raise ModuleNotFoundError(f"No module named {library!r}", name=library)

    monkeypatch.setattr("bench.__main__.import_module", missing)
    assert main([command, "--help"]) == 2
    expected = f"bench {command}: {library} is not installed: pip install {remedy}\n"
    assert capsys.readouterr().err == expected


def test_scheduled_verification_answers_as_plain_decoding_does(bench, tmp_path):  # noqa: F811
    (tmp_path / "two.txt").write_text("import os\ndef f(x):\n")
    arguments = (
        *("speed", "--dataset", tmp_path / "two.txt", "--temperature", 0, "--output-len", 12),
        *("--max-concurrency", 2, "--disable-shuffle"),
    )
    code, _, err, scheduled = bench(*arguments, "--verification", "scheduled")
    assert code == 0
    assert "a model of them is used" in err
    _, _, _, plain = bench(*arguments, "--draft", "none")
    assert [one["text"] for one in records(scheduled)] == [one["text"] for one in records(plain)]
    assert scheduled["runs"][0]["name"].endswith("scheduled")
    lengths = {n for one in records(scheduled) for n in one["proposal_lengths"]}
    assert len(lengths) > 1

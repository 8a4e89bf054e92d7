"""bench compare end to end on the embedded pair, its report, and the figures it is made of."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench import charts, figures
from bench.__main__ import main
from bench.compare import speedups
from bench.figures import acceptance, by_group, clustered_error, latency
from bench.records import Measurement, Record, Run, read_measurement
from tests.bench_runs import bench  # noqa: F401

REFERENCE = json.loads((Path(__file__).parent / "demo" / "reference.json").read_text())


def reference_records():
    """The reference's sampled runs as records."""
    return [
        Record(
            question_id=str(i),
            turn=0,
            prompt_tokens=1,
            output_tokens=64,
            finish_reason="length",
            seed=i,
            batch=i,
            arrivals=[[0.5, 1], [2.5, 64]],
            acceptance_lengths=run["acceptance_lengths"],
            proposal_lengths=run["proposal_lengths"],
            accepted_drafts=[length - 1 for length in run["acceptance_lengths"]],
            category="ab"[i % 2],
        )
        for i, run in enumerate(REFERENCE["sampled"]["runs"])
    ]


def test_the_reference_figures_exactly():
    runs, summary = REFERENCE["sampled"]["runs"], REFERENCE["sampled"]["summary"]
    found = acceptance(reference_records())
    lengths = [n for run in runs for n in run["acceptance_lengths"]]
    proposed = [n for run in runs for n in run["proposal_lengths"]]
    assert found["rounds"] == summary["rounds"] == len(lengths)
    assert found["acceptance_length"] == sum(lengths) / len(lengths)
    assert found["acceptance_length"] == pytest.approx(summary["mean"], abs=1e-12)
    assert found["acceptance_length_macro"] == pytest.approx(summary["mean_per_request"], abs=1e-12)
    assert found["drafts_per_round"] == sum(proposed) / len(proposed)
    assert found["verify_rate"] == sum(lengths) / (sum(proposed) + len(proposed))
    assert found["accept_rates_by_position"] == [
        sum(n - 1 > k for n in lengths) / sum(p > k for p in proposed) for k in range(7)
    ]
    assert found["survival_by_position"] == pytest.approx(summary["survival_by_position"])
    assert found["histogram"] == {n: lengths.count(n) for n in sorted(set(lengths))}
    assert found["standard_error"] == pytest.approx(0.030, abs=5e-4)  # clustered by request


def test_turns_of_a_conversation_count_as_one_request():
    first, second, third = reference_records()[:3]
    joined = [first, second, third.__class__(**{**vars(third), "question_id": "0"})]
    pooled = [n for one in (first, third) for n in one.acceptance_lengths]
    alone = second.acceptance_lengths
    expected = (sum(pooled) / len(pooled) + sum(alone) / len(alone)) / 2
    assert acceptance(joined)["acceptance_length_macro"] == pytest.approx(expected)
    groups = by_group(joined, "category")
    assert groups["a"]["requests"] == 2
    assert groups["b"]["acceptance_length"] == sum(alone) / len(alone)
    assert by_group(joined, "subset") == {}


def test_clustered_error_by_hand():
    values = [("a", -1.0), ("a", -1.0), ("b", 1.0), ("b", 1.0)]
    assert clustered_error(values, 4) == pytest.approx((2 / 1 * 8) ** 0.5 / 4)
    assert clustered_error([("a", 1.0)], 1) is None


def test_latency_by_hand():
    arrivals = ([[0.5, 1], [1.0, 3], [2.0, 5]], [[0.5, 1], [0.75, 2]], [[0.25, 1]])
    records = [
        Record(
            **{
                **vars(reference_records()[0]),
                "arrivals": times,
                "output_tokens": times[-1][1],
                "batch": batch,
                "sent": sent,
            }
        )
        for times, batch, sent in zip(arrivals, (0, 0, 1), (0.0, 1.5, 0.0), strict=True)
    ]
    found = latency(records)
    assert figures.total_seconds(records) == found["seconds"] == 2.5
    assert found["tokens_per_second"] == 8 / 2.5
    assert found["time_to_first_token"]["p50"] == 0.5
    assert found["inter_token_latency"]["mean"] == pytest.approx((0.5 + 1.0 + 0.25) / 3)
    assert found["time_per_output_token"]["mean"] == pytest.approx((1.5 / 4 + 0.25) / 2)


def run_of(name, seconds, draft="x", **changes):
    settings = {"num_drafts": 7, "confidence_threshold": 0.0, "concurrency": 1, "temperature": 1.0}
    return Run(name, draft, **(settings | changes), records=reference_records(), seconds=seconds)


def test_speedups_are_paired_within_repetitions():
    plain, fast = run_of("none", [2.0, 4.0, 3.0], "none"), run_of("a", [1.0, 2.0, 2.0])
    rows = speedups([fast, plain])
    assert rows[0] == {"name": "a", "seconds": 2.0, "speedup": 2.0, "least": 1.5, "most": 2.0}
    assert rows[1]["speedup"] is None


def test_charts_need_something_to_show():
    one = run_of("a", [1.0])
    assert charts.throughput_chart([one]) is None
    assert charts.sweep_chart([one]) is None
    wide = [run_of(f"a c={c}", [1.0], concurrency=c) for c in (1, 2)]
    assert "concurrency" in charts.throughput_chart(wide)
    swept = [run_of(f"a c={c}", [1.0], confidence_threshold=c) for c in (0.0, 0.5)]
    assert "confidence threshold" in charts.sweep_chart(swept)
    swept = [run_of(f"a n={n}", [1.0], num_drafts=n) for n in (3, 7)]
    assert "drafts a round" in charts.sweep_chart(swept)
    assert charts.acceptance_chart([run_of("none", [1.0], "none", num_drafts=0)]) is None


def test_drafts_side_by_side_and_the_report(bench, tmp_path):  # noqa: F811
    html = tmp_path / "report.html"
    code, out, _, measured = bench(
        *("compare", "--num-prompts", 2, "--output-len", 12, "--repeats", 2, "--html", html),
        *("--replay-rounds", 2),
    )
    assert code == 0
    drafted, plain = measured["runs"]
    assert [run["draft"] for run in measured["runs"]] == ["embedded", "none"]
    assert all(len(run["seconds"]) == 2 for run in measured["runs"])
    assert [record["question_id"] for record in drafted["records"]] == ["0", "1"]
    for record in plain["records"]:
        assert record["acceptance_lengths"] == [1] * len(record["acceptance_lengths"])
        assert record["possible_acceptance"] is None
    for record in drafted["records"]:
        shapes = [len(row) for row in record["possible_acceptance"]]
        assert shapes == record["proposal_lengths"]
        clean = record["clean_acceptance"]
        repeated = [i for i, row in enumerate(clean) if row]
        assert len(repeated) == min(2, len(clean))
        for i in repeated:  # the engine is true: a fresh prefill drafts from the same laws
            assert clean[i] == pytest.approx(record["possible_acceptance"][i], abs=1e-4)
    assert "speed-up" in out
    assert "not tested: fewer than 30 rounds" in out
    page = html.read_text()
    assert page.count('<img src="data:image/svg+xml;base64,') >= 3
    assert not re.search(r'(src|href)="(?!data:)', page)
    again = ("report", str(tmp_path / "measured.json"), "--html", str(html))
    assert main([*again, "--charts", str(tmp_path / "charts")]) == 0
    assert html.read_text() == page
    assert (tmp_path / "charts" / "speed-up.svg").read_text().startswith("<?xml")


def test_greedy_drafts_give_one_text_and_no_ceiling(bench, tmp_path):  # noqa: F811
    (tmp_path / "loop.txt").write_text("a = b\\nc = d\\n" * 12 + "a = b\n")
    code, out, _, measured = bench(
        *("compare", "--draft", "embedded", "--draft", "ngram", "--draft", "none"),
        *("--output-len", 12, "--repeats", 1, "--temperature", 0, "--num-speculative-tokens", 3),
        *("--dataset", tmp_path / "loop.txt"),
    )
    assert code == 0
    runs = measured["runs"]
    assert [run["name"] for run in runs] == ["embedded n=3", "ngram n=3", "none"]
    assert len({run["records"][0]["text"] for run in runs}) == 1
    assert max(runs[0]["records"][0]["proposal_lengths"]) == 3
    steps = [run["figures"]["rounds"] for run in runs]
    assert steps[1] < steps[2]  # the prompt repeats itself: lookup saves verify steps
    assert out.count("greedy decoding draws nothing") == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--draft", "none", "--draft", "none"), "named twice"),
        (("--draft", "none", "--num-speculative-tokens", 3), "there is no draft"),
        (("--draft", "ngram", "--confidence-threshold", 0.5), "no draft has a confidence head"),
        (("--num-speculative-tokens", 9), "num_drafts 9 is not within 1"),
        (("--category", "coding"), "choose from a --dataset"),
        (("--replay-rounds", -1), "cannot be negative"),
        (("--draft", "/no/such"), "/no/such"),
        (("--temperature", -1), "temperature cannot be negative"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(bench, arguments, words):  # noqa: F811
    code, out, err, _ = bench("compare", *arguments)
    assert (code, out) == (2, "")
    assert words in err.splitlines()[-1]
    assert err.splitlines()[-1].startswith("bench compare: ")


def change_record(**changes):
    """A change of the first record of the first run."""

    def change(tree):
        tree["runs"][0]["records"][0] |= changes

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tree: tree.pop("bench"), "bench is missing"),
        (lambda tree: tree.update(runs=[]), "it has no runs"),
        (lambda tree: tree["runs"][0].update(records=[]), "or one without records"),
        (lambda tree: tree.update(reliability=5), "reliability cannot be 5"),
        (lambda tree: tree.update(reliability={"x": [[[0.5]]]}), "reliability cannot be [0.5]"),
        (lambda tree: tree.update(environment=None), "environment cannot be None"),
        (lambda tree: tree["runs"][0].update(temperature="1"), "temperature cannot be '1'"),
        (lambda tree: tree["runs"][0].update(seconds=[0.0]), "its runs have no seconds"),
        (change_record(arrivals=[]), "a record has no time"),
        (change_record(arrivals=[[]]), "arrivals cannot be []"),
        (change_record(proposal_lengths=[1]), "lists of rounds that differ in length"),
        (change_record(output_tokens=True), "output_tokens cannot be True"),
        (change_record(sent=float("nan")), "sent cannot be nan"),
        (change_record(sent=10**400), "sent cannot be 1000"),
    ],
)
def test_a_report_of_a_damaged_file_is_one_sentence(change, words, tmp_path, capsys):
    path = tmp_path / "measured.json"
    run = replace(run_of("a", [1.0]), records=reference_records()[:2])
    Measurement("compare", {}, {"device": "cpu"}, [run]).write(path)
    assert read_measurement(path).runs[0].figures() == run.figures()
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))
    assert main(["report", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"bench report: {path} is not a file that bench compare or bench speed")
    assert words in line


def test_a_report_of_no_such_file_is_one_sentence(tmp_path, capsys):
    path = tmp_path / "x.json"
    remedy = "name a file that bench compare or bench speed wrote"
    for text, words in (
        (None, "cannot be read: No such file or directory"),
        ("[]", "holds no JSON object"),
        ("{", "is not JSON: "),
    ):
        if text is not None:
            path.write_text(text)
        assert main(["report", str(path)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"bench report: {path} {words}")
        assert line.endswith(remedy)


def test_a_report_that_cannot_be_written_is_one_sentence(tmp_path, capsys):
    path = tmp_path / "measured.json"
    run = replace(run_of("a", [1.0]), records=reference_records()[:2])
    Measurement("compare", {}, {"device": "cpu"}, [run]).write(path)
    for flags, words in (
        (("--html", str(tmp_path / "no" / "x.html")), "its folder does not exist"),
        (("--charts", str(path)), "is a file; name a folder"),
    ):
        assert main(["report", str(path), *flags]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line


@pytest.mark.parametrize("flags", [("--batch", "0"), ("--batch", "1", "-2"), ("--cached", "0")])
def test_a_step_of_no_rows_is_one_sentence(flags, capsys):
    assert main(["step", *flags]) == 2
    assert capsys.readouterr().err == "bench step: --batch and --cached must be positive\n"

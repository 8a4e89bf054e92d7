"""bench step: the loops do a round's whole work, the HLO is read right, the figures follow."""

import json
from collections import Counter

import pytest

from bench import hlo, step
from bench.__main__ import main
from bench.loops import compile_loops
from bench.step import derive
from tests.tiny import quick_compilation, random_params, tiny_config

PROGRAM = """HloModule jit_rounds, entry_computation_layout={(f32[8,64]{1,0})->f32[8,64]{1,0}}

%fused_copy (p.1: f32[8,64]) -> f32[4,128] {
  %p.1 = f32[8,64]{1,0} parameter(0)
  %copy.9 = f32[8,64]{0,1} copy(%p.1)
  ROOT %bitcast.1 = f32[4,128]{1,0} bitcast(%copy.9)
}

%other (o.1: f32[8,64]) -> f32[8,64] {
  %o.1 = f32[8,64]{1,0} parameter(0)
  ROOT %negated = f32[8,64]{1,0} negate(%o.1)
}

%inner_body (a.1: (s32[], f32[8,64])) -> (s32[], f32[8,64]) {
  %a.1 = (s32[], f32[8,64]{1,0}) parameter(0)
  ROOT %pair_fusion = (s32[], /*index=1*/f32[8,64]{1,0}) fusion(%a.1), kind=kLoop, calls=%other
}

%inner_condition (a.2: (s32[], f32[8,64])) -> pred[] {
  %a.2 = (s32[], f32[8,64]{1,0}) parameter(0)
  ROOT %less = pred[] fusion(%a.2), kind=kLoop, calls=%other
}

%branch_a (b.1: f32[8,64]) -> f32[8,64] {
  %b.1 = f32[8,64]{1,0} parameter(0)
  %one = f32[8,64]{1,0:T(8,128)} negate(%b.1)
  ROOT %two = f32[8,64]{1,0} negate(%one)
}

%branch_b (b.2: f32[8,64]) -> f32[8,64] {
  ROOT %b.2 = f32[8,64]{1,0} parameter(0)
}

%outer_body (c.1: (s32[], f32[8,64])) -> (s32[], f32[8,64]) {
  %c.1 = (s32[], f32[8,64]{1,0}) parameter(0)
  %x = f32[8,64]{1,0} get-tuple-element(%c.1), index=1
  %nothing = f32[1,0]{1,0} copy(%x)
  %copy_fusion = f32[4,128]{1,0} fusion(%x), kind=kLoop, calls=%fused_copy
  %small = s32[2]{0} copy(%x)
  %gemm = f32[8,64]{1,0} custom-call(%x), custom_call_target="__cublas$gemm", metadata={op_name="jit(rounds)/while/body/target_verify/dot_general"}
  %start = f32[8,64]{1,0} fusion-start(%gemm), kind=kLoop, calls=%other
  %done = f32[8,64]{1,0} fusion-done(%start)
  %choice = f32[8,64]{1,0} conditional(%small, %gemm, %gemm), branch_computations={%branch_a, %branch_b}
  %loop = (s32[], f32[8,64]{1,0}) while(%c.1), condition=%inner_condition, body=%inner_body, metadata={op_name="jit(rounds)/while/body/markov_walk/while"}, backend_config={"known_trip_count":{"n":"7"}}
  ROOT %out = (s32[], f32[8,64]{1,0}) tuple(%small, %choice)
}

%outer_condition (c.2: (s32[], f32[8,64])) -> pred[] {
  %c.2 = (s32[], f32[8,64]{1,0}) parameter(0)
  ROOT %go = pred[] fusion(%c.2), kind=kLoop, calls=%other
}

ENTRY %main (x: f32[8,64]) -> f32[8,64] {
  %x.1 = f32[8,64]{1,0} parameter(0)
  %before = f32[8,64]{1,0} copy(%x.1)
  %t = (s32[], f32[8,64]{1,0}) tuple(%before)
  %rounds = (s32[], f32[8,64]{1,0}) while(%t), condition=%outer_condition, body=%outer_body, metadata={op_name="jit(rounds)/while"}
  ROOT %y = f32[8,64]{1,0} get-tuple-element(%rounds), index=1
}
"""  # noqa: E501


def test_launches_and_copies_of_a_program():
    program = hlo.parse(PROGRAM)
    assert program.outer_loop() == ("outer_body", "outer_condition")
    # fusion, copy, library call, async fusion, 1 + 2 for the conditional, 7 x (1 + 1); condition
    assert program.round_launches() == 4 + 3 + 14 + 1
    assert program.copied([8 * 64]) == ["copy_fusion"]
    assert program.copied([2]) == ["small"]
    assert program.copied([64]) == []
    (call,) = (one for one in program.computations["outer_body"] if one.name == "gemm")
    assert (call.target, call.opcode) == ("__cublas$gemm", "custom-call")
    assert call.op_name == "jit(rounds)/while/body/target_verify/dot_general"


def test_other_text_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo.parse("nothing")
    with pytest.raises(ValueError, match="has no loop"):
        hlo.parse(
            "ENTRY %e (x: f32[]) -> f32[] {\n  ROOT %x = f32[] parameter(0)\n}\n"
        ).outer_loop()


def test_nothing_is_lifted_out_of_the_loops_or_dropped():
    config = tiny_config(sampled=False)
    products = {}
    for loop in compile_loops(config, random_params(config), 1):
        inside = loop.program.reachable(loop.program.outer_loop()[0])
        parts = (part for one in inside for part in loop.program.contents(one))
        products[loop.name] = Counter(part.shape for part in parts if part.opcode == "dot")
    assert products["draft_step"] + products["verify_step"] == products["round"]
    assert min(sum(counts.values()) for counts in products.values()) > 3


def lines(*entries):
    shared = {"implementation": "xla", "sampled": False, "dtype": "float32", "read_bandwidth": 1e6}
    return [
        {
            **shared,
            "name": name,
            "shape": {"model": "m", "batch": batch, "cached": cached},
            "time_us": time_us,
            "bytes": moved,
        }
        for name, batch, cached, time_us, moved in entries
    ]


def test_derived_figures_by_hand():
    found = lines(
        ("plain_decode", 2, 10, 1000.0, 100),
        ("round", 2, 10, 1500.0, 200),
        ("round", 2, 90, 1800.0, 400),
    )
    derive(found, [1.0, 3.0])
    first, longer = found[1:]
    assert first["break_even"] == 1.5
    assert first["speedup"] == {"1": 0.667, "3": 2.0}
    assert first["tokens_per_second"] == {"1": round(2 / 1500e-6, 1), "3": 4000.0}
    assert "cache_growth" not in first
    assert longer["cache_growth"] == 1.5  # 300 us for 200 bytes at one a microsecond
    assert "break_even" not in longer  # nothing plain was measured there


def test_the_embedded_pair(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("bench.loops.REPEATS", 1)
    out, chart = tmp_path / "steps.jsonl", tmp_path / "steps.svg"
    with quick_compilation():
        code = main(["step", "--cached", "20", "60", "--out", str(out), "--chart", str(chart)])
    assert code == 0
    found = [json.loads(line) for line in out.read_text().splitlines()]
    names = ("plain_decode", "draft_step", "verify_step", "round")
    assert [line["name"] for line in found] == [name for name in names for _ in range(2)]
    for line in found:
        assert line["time_us"] > 0
        assert line["shape"] == {"model": "embedded", "batch": 1, "cached": line["shape"]["cached"]}
    drafted = found[-2:]
    assert all(line["launches"] > 0 and line["break_even"] > 0 for line in drafted)
    assert all(line["idle"].keys() == {"ahead", "read"} for line in drafted)
    assert "cache_growth" in drafted[1]
    assert "pays above" in capsys.readouterr().out
    assert "verify step" in chart.read_text()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--chart", "x.pdf"), "name a file that ends in .svg or .png"),
        (("--chart", "/no/such/x.svg"), "its folder does not exist"),
        (("--acceptance", "0"), "an acceptance length is above 0"),
        (("--acceptance", "nan"), "an acceptance length is above 0"),
        (("--out", "/no/such/x"), "--out /no/such/x: its folder does not exist; make it first"),
        (("--out", "/"), "--out / is a folder; name a file"),
        (("--implementation", "auto", "foo"), "implementation must be one of"),
    ],
)
def test_a_mistake_is_one_sentence(flags, words, capsys):
    assert main(["step", *flags]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_numbers_of_devices_are_checked() -> None:
    for flags, words in (
        (["--tensor-parallel", "0"], "must be at least 1"),
        (["--data-parallel", "2", "--batch", "3"], "--data-parallel 2 does not divide --batch 3"),
        (["--tensor-parallel", "64"], "need 64 devices"),
    ):
        with pytest.raises(ValueError, match=words):
            step.main(flags)

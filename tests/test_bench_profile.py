"""bench profile: kernels get their class and stage, and the shares of a trace add up."""

import json

import pytest

from bench import hlo
from bench.__main__ import main
from bench.kernel_classes import CLASSES, STAGES, Kernels, class_of_name
from bench.profile import summarize
from bench.trace import Event, gaps_us

SCOPE = "jit(decode_rounds)/while/body"
PROGRAM = f"""HloModule jit_decode_rounds

%gemm_fusion_dot.2_computation (p: bf16[8,64]) -> bf16[8,640] {{
  %p = bf16[8,64]{{1,0}} parameter(0)
  ROOT %dot.1 = bf16[8,640]{{1,0}} dot(%p, %p)
}}

%softmax_computation (p.2: bf16[8,64]) -> f32[8,64] {{
  %p.2 = bf16[8,64]{{1,0}} parameter(0)
  %rsqrt.1 = f32[8,64]{{1,0}} rsqrt(%p.2)
  ROOT %multiply.1 = f32[8,64]{{1,0}} multiply(%rsqrt.1, %p.2)
}}

%fused_add (p.3: bf16[8,64]) -> bf16[8,64] {{
  %p.3 = bf16[8,64]{{1,0}} parameter(0)
  ROOT %add.1 = bf16[8,64]{{1,0}} add(%p.3, %p.3)
}}

%fused_transpose (p.4: bf16[8,64]) -> bf16[64,8] {{
  %p.4 = bf16[8,64]{{1,0}} parameter(0)
  ROOT %transpose.1 = bf16[64,8]{{1,0}} transpose(%p.4), dimensions={{1,0}}
}}

ENTRY %main (x: bf16[8,64]) -> bf16[8,64] {{
  %x = bf16[8,64]{{1,0}} parameter(0)
  %gemm_fusion_dot.2 = bf16[8,640]{{1,0}} fusion(%x), kind=kCustom, calls=%gemm_fusion_dot.2_computation, metadata={{op_name="{SCOPE}/target_verify/...d,nd->...n/dot_general"}}
  %loop_reduce_fusion.7 = bf16[8,640]{{1,0}} fusion(%gemm_fusion_dot.2), kind=kLoop, calls=%fused_add, metadata={{op_name="{SCOPE}/target_verify/...d,nd->...n/dot_general"}}
  %custom-call.3 = bf16[8,640]{{1,0}} custom-call(%x), custom_call_target="__cublas$lt$matmul", metadata={{op_name="{SCOPE}/dspark_propose/dot_general"}}
  %mpmd_map.34 = bf16[8,64]{{1,0}} custom-call(%x), custom_call_target="mosaic_gpu_v2", metadata={{op_name="{SCOPE}/dspark_propose/jit(block_attention_kernel)/block_attention/mpmd_map"}}
  %mpmd_map.35 = bf16[8,64]{{1,0}} custom-call(%x), custom_call_target="mosaic_gpu_v2", metadata={{op_name="{SCOPE}/target_verify/jit(qkv_write_kernel)/qkv_write/mpmd_map"}}
  %mpmd_map.36 = bf16[8,64]{{1,0}} custom-call(%x), custom_call_target="mosaic_gpu_v2", metadata={{op_name="{SCOPE}/target_verify/jit(fused_matmul_kernel)/fused_matmul/mpmd_map"}}
  %einsum.1 = bf16[8,64]{{1,0}} dot(%x, %x), metadata={{op_name="{SCOPE}/target_verify/block_attention/btkgh,bskh->bkgts/dot_general"}}
  %triton_softmax.20 = f32[8,64]{{1,0}} fusion(%x), kind=kCustom, calls=%softmax_computation, metadata={{op_name="{SCOPE}/target_verify/mul"}}
  %loop_add_fusion.3 = bf16[8,64]{{1,0}} fusion(%mpmd_map.35), kind=kLoop, calls=%fused_add, metadata={{op_name="{SCOPE}/target_verify/add"}}
  %input_reduce_fusion.1 = bf16[8,64]{{1,0}} fusion(%x), kind=kInput, calls=%fused_add, metadata={{op_name="{SCOPE}/decode_sample/reduce_max"}}
  %input_reduce_fusion.2 = bf16[8,64]{{1,0}} fusion(%x), kind=kInput, calls=%fused_add, metadata={{op_name="{SCOPE}/dspark_propose/markov_walk/while/body/reduce_max"}}
  %wrapped_transpose = bf16[64,8]{{1,0}} fusion(%mpmd_map.34), kind=kInput, calls=%fused_transpose
  %copy.9 = bf16[8,64]{{1,0}} copy(%x)
  %walk = (bf16[8,64]{{1,0}}) while(%x), condition=%c, body=%b, metadata={{op_name="{SCOPE}/dspark_propose/markov_walk/while"}}
  ROOT %result = bf16[8,64]{{1,0}} bitcast(%x)
}}
"""  # noqa: E501
EXPECTED = {
    "gemm_fusion_dot.2": ("matmul", "target_verify"),
    "loop_reduce_fusion.7": ("matmul", "target_verify"),  # the sum of a split product
    "custom-call.3": ("matmul", "dspark_propose"),
    "mpmd_map.34": ("attention", "dspark_propose"),
    "mpmd_map.35": ("elementwise", "target_verify"),
    "mpmd_map.36": ("matmul", "target_verify"),
    "einsum.1": ("attention", "target_verify"),
    "triton_softmax.20": ("norm", "target_verify"),
    "loop_add_fusion.3": ("elementwise", "target_verify"),
    "input_reduce_fusion.1": ("sampling", "decode_sample"),
    "input_reduce_fusion.2": ("sampling", "dspark_propose"),
    "wrapped_transpose": ("copies", "dspark_propose"),  # by its operand: it carries no scope
    "copy.9": ("copies", "other"),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_class_and_stage_of_an_instruction(name):
    kernels = Kernels(hlo.parse(PROGRAM))
    by_op, by_kernel = kernels.find("", name), kernels.find(name.replace(".", "_"), "")
    assert by_op is by_kernel is not None
    assert (kernels.class_of("x", by_op), kernels.stage_of(by_op)) == EXPECTED[name]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("nvjet_hsh_128x64_64x8_1x2_h_bz_coopA_TNT", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>", "matmul"),
        ("gemm_fusion_dot_412", "matmul"),
        ("void splitKreduce_kernel<32, 16, int>", "matmul"),
        ("block_attention_mosaic_gpu_kernel", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma", "attention"),
        ("join_runs_mosaic_gpu_kernel", "attention"),
        ("markov_walk_mosaic_gpu_kernel", "sampling"),
        ("qkv_write_mosaic_gpu_kernel", "elementwise"),
        ("MemcpyD2D", "copies"),
        ("Memset", "copies"),
        ("loop_add_fusion_3", "elementwise"),
        ("triton_softmax_20", "norm"),
    ],
)
def test_class_of_a_name_alone(name, found):
    assert class_of_name(name) == found
    assert Kernels(hlo.parse(PROGRAM)).class_of(name, None) == found


def test_a_trace_adds_up():
    events = [
        Event("walk", 0.0, 100.0, "walk"),  # encloses what follows
        Event("k1", 0.0, 40.0, "gemm_fusion_dot.2"),
        Event("k2", 44.0, 8.0, "triton_softmax.20"),
        Event("k3", 52.0, 8.0, "triton_softmax.20"),
        Event("fused_matmul_mosaic_gpu_kernel", 60.0, 20.0),  # belongs where the one before does
        Event("MemcpyD2H", 80.0, 20.0),
    ]
    found = summarize(events, Kernels(hlo.parse(PROGRAM)), rounds=2)
    assert found["time_us"] == 50.0
    expected = {"matmul": 30.0, "norm": 8.0, "copies": 10.0, "gaps": 2.0}
    assert found["classes"] == dict.fromkeys(CLASSES, 0.0) | expected
    assert found["shares"]["matmul"] == 0.6
    assert found["stages"] == dict.fromkeys(STAGES, 0.0) | {"target_verify": 38.0, "other": 10.0}
    assert found["kernels"] == 2.5
    norm = next(one for one in found["longest"] if one["class"] == "norm")
    assert norm["kernel"] == "triton_softmax f32[8,64]"
    assert (norm["runs"], norm["time_us"]) == (1.0, 8.0)


def test_gaps_of_kernels_that_overlap():
    events = [Event("a", 0.0, 10.0), Event("b", 2.0, 3.0), Event("c", 12.0, 1.0)]
    assert gaps_us(events) == 2.0


def test_the_embedded_pair(tmp_path, capsys):
    out, chart = tmp_path / "profile.jsonl", tmp_path / "profile.svg"
    flags = ("--cached", "60", "--rounds", "2", "--out", str(out), "--chart", str(chart))
    assert main(["profile", *flags]) == 0
    plain, drafted = (json.loads(line) for line in out.read_text().splitlines())
    assert (plain["name"], drafted["name"]) == ("plain_decode", "round")
    for line in (plain, drafted):
        assert sum(line["shares"].values()) == pytest.approx(1, abs=1e-3)
        assert sum(line["classes"].values()) == pytest.approx(line["time_us"], abs=1)
        for name in ("matmul", "attention", "norm", "sampling"):
            assert line["classes"][name] > 0
        assert line["classes"]["matmul"] == max(line["classes"].values())
        assert line["stages"]["target_verify"] == max(line["stages"].values())
        assert line["stages"]["decode_sample"] > 0
        assert line["warmup_us"] > 0
    assert plain["stages"]["dspark_propose"] == 0 < drafted["stages"]["dspark_propose"]
    assert plain["kernels_per_token"] == plain["kernels"] > 100
    assert drafted["kernels_per_token"] < drafted["kernels"]
    assert "20,000 launches in all" in " ".join(capsys.readouterr().out.split())
    assert "by stage" in chart.read_text()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--rounds", "17"), "--rounds is within 1 and 16"),
        (("--cached", "0"), "must be at least 1"),
        (("--implementation", "triton"), "must be one of auto, pallas, xla"),
    ],
)
def test_a_mistake_is_one_sentence(flags, words, capsys):
    assert main(["profile", *flags]) == 2
    assert words in capsys.readouterr().err

"""Damaged files and tensors end in one clear sentence and exit code 2."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoints import save_json, save_tensors, target_files
from tests.damage import (
    CONFIDENCE,
    PAIR,
    REMOVED,
    W1,
    W2,
    Damage,
    append,
    assert_refused,
    both,
    config,
    drop,
    duplicate_header_key,
    edit_index,
    entry,
    header,
    move,
    only_pickle,
    pipe,
    poison,
    put,
    remove,
    rewrite,
    sharded,
    tensors,
    truncated,
)

Q0 = "layers.0.self_attn.q_proj.weight"
CASES: dict[str, tuple[Damage, str]] = {
    "no target folder": (move("target", "x"), "no such folder"),
    "no config": (remove("draft/config.json"), "config.json: cannot be read"),
    "config is a list": (rewrite("draft/config.json", b"[1]"), "must hold a JSON object"),
    "config is cut": (rewrite("draft/config.json", b'{"a": '), "not valid JSON"),
    "config is not text": (rewrite("target/config.json", b"\xff\xfe\x00"), "not valid JSON"),
    "config with a byte-order mark": (
        rewrite("draft/config.json", b"\xef\xbb\xbf{}"),
        "config.json: starts with a byte-order mark: save it as UTF-8 without one",
    ),
    "config nests for ever": (rewrite("draft/config.json", b"[" * 10**6), "nested too deeply"),
    "config key twice": (
        rewrite("draft/config.json", b'{"block_size": 5, "block_size": 7}'),
        "the entry block_size is there twice",
    ),
    "config is a folder": (
        both(remove("draft/config.json"), lambda f: (f / "draft/config.json").mkdir()),
        "config.json: not a regular file",
    ),
    "config is a pipe": (pipe("draft/config.json"), "config.json: not a regular file"),
    "weights are a pipe": (
        pipe("draft/model.safetensors"),
        "model.safetensors: not a regular file",
    ),
    "no weights": (remove("draft/model.safetensors"), "no weights"),
    "a pickle": (only_pickle, "pytorch_model.bin is a pickle"),
    "shards without index": (
        sharded(lambda f: (f / "model.safetensors.index.json").unlink()),
        "model-00001-of-00003.safetensors is there, but",
    ),
    "missing shard": (
        sharded(lambda f: (f / "model-00002-of-00003.safetensors").unlink()),
        "model-00002-of-00003.safetensors: missing, although",
    ),
    "index without map": (
        sharded(lambda f: save_json(f / "model.safetensors.index.json", {})),
        "has no weight_map",
    ),
    "index leads outside": (
        sharded(edit_index(lambda m: m.update({"x": "../draft/model.safetensors"}))),
        "'../draft/model.safetensors' is not the name of a safetensors file",
    ),
    "index names a tensor that is not there": (
        sharded(edit_index(lambda m: m.update({"x.weight": "model-00001-of-00003.safetensors"}))),
        "x.weight: missing from model-00001-of-00003.safetensors, although",
    ),
    "index lists a tensor elsewhere": (
        sharded(
            edit_index(
                lambda m: m.update({"model.norm.weight": "model-00001-of-00003.safetensors"})
            )
        ),
        "model.norm.weight in model-0000",
    ),
    "tensor in two shards": (
        sharded(
            lambda f: save_tensors(f / "model-00001-of-00003.safetensors", target_files(PAIR)[1])
        ),
        "duplicated, in model-00001-of-00003.safetensors and in model-0000",
    ),
    "truncated weights": (truncated("draft/model.safetensors", 9000), "truncated or damaged"),
    "empty weights": (truncated("draft/model.safetensors", 0), "not a complete safetensors file"),
    "weights of seven bytes": (truncated("draft/model.safetensors", 7), "not a complete safe"),
    "header of 2**60 bytes": (
        rewrite("draft/model.safetensors", struct.pack("<Q", 1 << 60) + b"{}"),
        "a header of 1152921504606846976 bytes is announced",
    ),
    "bytes after the data": (
        append("draft/model.safetensors", b"1234"),
        "truncated or damaged",
    ),
    "header is not JSON": (header(lambda tree: "{nothing"), "header: not valid JSON"),
    "header entry twice": (header(duplicate_header_key), "norm.weight is there twice"),
    "header shape lies": (entry("fc.weight", shape=[1 << 40, 1 << 40]), "does not fill its bytes"),
    "header shape negative": (entry("fc.weight", shape=[-32, -96]), "not whole numbers"),
    "header offsets outside": (
        entry("fc.weight", data_offsets=[1 << 50, (1 << 50) + 6144]),
        "leaves a gap",
    ),
    "header offsets backwards": (entry("fc.weight", data_offsets=[64, 0]), "does not fill"),
    "header offsets overlap": (
        header(
            lambda t: t["norm.weight"].update(data_offsets=t["hidden_norm.weight"]["data_offsets"])
        ),
        "overlaps the tensor before it",
    ),
    "header dtype unknown": (entry("fc.weight", dtype="Q4_0"), "unknown dtype Q4_0"),
    "header entry empty": (header(lambda t: t.update({"x": {}})), "must have dtype, shape and"),
    # tensors
    "missing tensor": (tensors("draft", drop(Q0)), f"{Q0}: missing from model.safetensors"),
    "missing target tensor": (
        tensors("target", drop("model.layers.2.mlp.down_proj.weight")),
        "layers.2.mlp.down_proj.weight: missing from",
    ),
    "unknown tensor": (tensors("draft", put("extra.weight", 3)), "extra.weight in model.safe"),
    "a layer too many": (
        config("draft", num_hidden_layers=1, layer_types=["full_attention"]),
        "layers.1.input_layernorm.weight in model.safetensors: unknown tensor",
    ),
    "a bias without attention_bias": (
        tensors("draft", put("layers.0.self_attn.q_proj.bias", 32)),
        "layers.0.self_attn.q_proj.bias in model.safetensors: unknown tensor",
    ),
    "the same tensor under two names": (
        tensors("draft", put("model.fc.weight", 32, 96)),
        "duplicated",
    ),
    "wrong shape": (
        tensors("draft", put(Q0, 16, 32)),
        "shape [16, 32], but the config asks for [32, 32]",
    ),
    "transposed": (tensors("draft", put("fc.weight", 96, 32)), "fc.weight"),
    "nan": (tensors("draft", poison("norm.weight", np.nan)), "norm.weight in model.safetensors: h"),
    "infinity": (tensors("target", poison("model.norm.weight", np.inf)), "holds NaN or infinity"),
    "float64": (
        tensors("draft", put("fc.weight", 32, 96, dtype=np.float64)),
        "stored as F64, must be one of F32, F16, BF16",
    ),
    "int8": (tensors("draft", put("fc.weight", 32, 96, dtype=np.int8)), "stored as I8"),
    "quantised tensors": (
        tensors("draft", put("layers.0.mlp.up_proj.weight_scale", 48)),
        "weight_scale: quantised weights are not supported",
    ),
    "tied with a stored head": (config("target", tie_word_embeddings=True), "differs from"),
    "untied without a head": (tensors("target", drop("lm_head.weight")), "lm_head.weight: missing"),
    "rank without W1": (
        tensors("draft", drop(W1)),
        "markov_rank is 8, but the tensor markov_head.markov_w1.weight is missing",
    ),
    "rank that W1 has not": (config("draft", markov_rank=16), "markov_rank is 16, but"),
    "rank 0 with W1": (config("draft", markov_rank=0), "markov_rank is 0, but"),
    "W2 alone": (
        both(tensors("draft", drop(W1)), config("draft", markov_rank=REMOVED)),
        f"{W1} in model.safetensors: missing, although {W2} is there",
    ),
    "gated without a gate": (
        config("draft", markov_head_type="gated"),
        "markov_head_type is gated",
    ),
    "confidence without a head": (
        tensors("draft", drop(CONFIDENCE, "confidence_head.proj.bias")),
        "enable_confidence_head is True, but the tensor confidence_head.proj.weight is missing",
    ),
    "confidence that is off": (
        config("draft", enable_confidence_head=False),
        "enable_confidence_head is False, but the tensor confidence_head.proj.weight is there",
    ),
    "confidence of another width": (
        tensors("draft", put(CONFIDENCE, 1, 33)),
        "confidence_head.proj.weight has shape [1, 33]",
    ),
    "confidence that reads no Markov": (
        config("draft", confidence_head_with_markov=False),
        "confidence_head_with_markov False",
    ),
}


@pytest.mark.parametrize("name", list(CASES))
def test_a_damaged_checkpoint_ends_in_a_sentence(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, words = CASES[name]
    assert_refused(tmp_path, damage, words, capsys)

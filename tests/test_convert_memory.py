"""Loading takes little more memory than the weights, measured on gigabytes of zeros."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoints import save_json
from tests.tiny_pair import TinyPair

MEASURE = """
import json, sys, threading, time
import jax, jax.numpy as jnp
from convert.packaging import read_target
from convert.apply import load_target_params, param_bytes

def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(l.split()[1]) * 1024 for l in lines if l.startswith("RssAnon"))

jnp.zeros(8).block_until_ready()
before, peak, stop = anonymous(), 0, threading.Event()

def watch():
    global peak
    while not stop.is_set():
        peak = max(peak, anonymous())
        time.sleep(0.002)

thread = threading.Thread(target=watch)
thread.start()
source = read_target(sys.argv[1])
params = load_target_params(source, sys.argv[2])
stop.set()
thread.join()
print(json.dumps([max(peak, anonymous()) - before, param_bytes(source, sys.argv[2])]))
"""


def write_large(folder: Path, layers: int, dtype: str) -> None:
    """Write a sparse checkpoint of zeros: gigabytes to read, nothing on the disk."""
    width, mlp, vocab = 1024, 4096, 65536
    tree = TinyPair().layer_tree(layers) | {
        "architectures": ["Qwen3ForCausalLM"],
        **{"hidden_size": width, "intermediate_size": mlp, "num_attention_heads": 16},
        **{"num_key_value_heads": 8, "head_dim": 64, "vocab_size": vocab},
    }
    save_json(folder / "config.json", tree)
    shapes = {"embed_tokens": (vocab, width), "norm": (width,), "lm_head": (vocab, width)}
    for i in range(layers):
        parts = {
            "self_attn.q_proj": (1024, width),
            "self_attn.k_proj": (512, width),
            "self_attn.v_proj": (512, width),
            "self_attn.o_proj": (width, 1024),
            "self_attn.q_norm": (64,),
            "self_attn.k_norm": (64,),
            "mlp.gate_proj": (mlp, width),
            "mlp.up_proj": (mlp, width),
            "mlp.down_proj": (width, mlp),
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
        }
        shapes |= {f"layers.{i}.{name}": shape for name, shape in parts.items()}
    header, end = {}, 0
    for name, shape in shapes.items():
        size = int(np.prod(shape)) * {"BF16": 2, "F32": 4}[dtype]
        offsets = [end, end + size]
        header[f"{name}.weight"] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        end += size
    raw = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + end)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize(("stored", "dtype"), [("BF16", "bfloat16"), ("BF16", "float32")])
def test_peak_memory_while_loading(tmp_path: Path, stored: str, dtype: str) -> None:
    layers = 55 if dtype == "bfloat16" else 1  # 2 GB of parameters; 0.6 GB where they are cast
    write_large(tmp_path, layers, stored)
    command = [sys.executable, "-c", MEASURE, str(tmp_path), dtype]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    peak, weights = json.loads(run.stdout.splitlines()[-1])
    assert weights > (1.9e9 if dtype == "bfloat16" else 5e8)
    assert peak <= 1.15 * weights, (peak, weights)

"""bench peers: the eager loop is a true DSpark loop, and the command alternates and compares."""

import json
import sys

import pytest
import torch

from bench.__main__ import main
from bench.peers import alternate, ratios
from bench.torch_peers import Decoder, build_draft, build_target, qwen3_config
from tests.tiny import quick_compilation, random_params, tiny_config, tiny_layers
from tests.torch_reference import TorchDraft, generate

CONFIG = tiny_config(vocab=7, max_length=64)  # so few tokens that drafts are right now and then


def test_the_eager_loop_is_the_references():
    torch.manual_seed(3)
    target = build_target(CONFIG, 128, "cpu")
    draft = build_draft(CONFIG.draft, "float32", "cpu")
    prompt = [1, 4, 2, 2, 5]
    decoder = Decoder(target, draft, torch.tensor(prompt))
    tokens = [int(decoder.anchor)]
    rounds = [decoder.round() for _ in range(20)]

    shapes = qwen3_config(CONFIG.draft.layers, 7, False, 128)
    shapes.target_layer_ids, shapes.markov_rank = CONFIG.draft.taps, CONFIG.draft.markov_rank
    shapes.markov_head_type, shapes.block_size = "vanilla", CONFIG.draft.block_size
    shapes.mask_token_id = CONFIG.draft.mask_token_id
    reference = TorchDraft(shapes).eval()
    missing, unexpected = reference.load_state_dict(draft.state_dict(), strict=False)
    assert (set(missing), unexpected) == ({"embed_tokens.weight", "lm_head.weight"}, [])
    reference.embed_tokens, reference.lm_head = target.model.embed_tokens, target.lm_head
    run = generate(target, reference, prompt, max_new_tokens=sum(map(len, rounds)))
    assert run.acceptance_lengths == [len(emitted) for emitted in rounds]
    assert max(run.acceptance_lengths) > 1
    tokens += [token for emitted in rounds for token in emitted]
    assert run.output_ids[len(prompt) :] == tokens[: len(run.output_ids) - len(prompt)]


def test_repetitions_alternate_and_ratios_pair_within_them():
    order = []

    def timer(name, values):
        def take():
            order.append(name)
            return next(values)

        return take

    timers = {
        "plain_decode": timer("plain_decode", iter([9.0, 2.0, 4.0, 6.0])),
        "round": timer("round", iter([9.0, 1.0, 4.0, 2.0])),
    }
    times = alternate(timers, 3)
    assert order == ["plain_decode", "round"] * 4
    assert times == {"plain_decode": [2.0, 4.0, 6.0], "round": [1.0, 4.0, 2.0]}
    assert ratios(times, 2.0) == {"over_plain_decode": [2.0, 4.0, 6.0]}


def test_the_command_on_a_tiny_pair(tmp_path, monkeypatch, capsys):
    params = random_params(CONFIG)
    monkeypatch.setattr("bench.peers.pair", lambda *_, **decoding: (CONFIG, params))
    monkeypatch.setattr("bench.loops.REPEATS", 1)
    out = tmp_path / "peers.jsonl"
    flags = ("--cached", "8", "--repeats", "2", "--tokens", "3", "--rounds", "2")
    with quick_compilation():
        assert main(["peers", *flags, "--out", str(out)]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    names = ["plain_decode", "round", "torch_decode", "torch_round"]
    assert [line["name"] for line in lines] == names
    assert all(len(line["times_us"]) == 2 and line["time_us"] > 0 for line in lines)
    found = lines[1]["ratios"]
    assert set(found) == {"over_plain_decode", "over_torch_decode", "over_torch_round"}
    assert all(low <= middle <= high for low, middle, high in found.values())
    assert "x transformers' decoding, at acceptance length 4.81" in capsys.readouterr().out


def test_without_torch_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr("bench.peers.pair", lambda *_, **decoding: (CONFIG, {}))
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["peers"]) == 2
    err = capsys.readouterr().err
    assert err == "bench peers: PyTorch is not installed beside this package: pip install torch\n"


@pytest.mark.parametrize(
    ("flag", "value", "rows"), [("--tokens", 6000, 6000), ("--rounds", 600, 4800)]
)
def test_more_than_the_cache_holds_is_refused(flag, value, rows, capsys):
    assert main(["peers", flag, str(value)]) == 2
    expected = f"bench peers: {flag} would add {rows} cache rows, at most 512 fit\n"
    assert capsys.readouterr().err == expected


def test_another_architecture_is_refused():
    with pytest.raises(ValueError, match="run Qwen3 alone"):
        qwen3_config(tiny_layers(windows=(4, 0)), 7, False, 64)
    with pytest.raises(ValueError, match="vanilla Markov head"):
        build_draft(tiny_config(markov="gated").draft, "float32", "cpu")

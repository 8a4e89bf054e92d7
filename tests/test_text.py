"""Streamed pieces join to the one-shot text, never split a character, and obey stop strings."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from dspark_jax.text import TextStream, has_chat_template, open_tokenizer

DEMO = Path(__file__).parent.parent / "dspark_jax" / "demo" / "target"
SAMPLE = 'def naïve(x):\n    """Größe 漢字かな 🙂👩‍👩‍👧 ﬁn"""\n\treturn  x  # end\n'


@pytest.fixture(scope="module")
def demo():
    return open_tokenizer(DEMO)


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory):
    """A tokenizer in SentencePiece's manner: a word marker, byte tokens, one leading space less."""
    folder = tmp_path_factory.mktemp("byte_fallback")
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", "é", "漢", "▁▁", "▁a", "▁b", "ab", "▁ab"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = [("▁", "▁"), ("▁", "a"), ("▁", "b"), ("a", "b"), ("▁", "ab")]
    model = tokenizers.models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        "<s> $A", "<s> $A <s> $B", [("<s>", 1)]
    )
    tokenizer.enable_truncation(4)  # left over from training: must not cut a prompt
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    return open_tokenizer(folder)


def stream(tokenizer, ids, stop=()):
    text = TextStream(tokenizer, stop)
    pieces = [text.push(i) for i in ids]
    return [*pieces, text.finish()], text.stopped


@settings(deadline=None, max_examples=200)
@given(ids=st.lists(st.integers(0, 4095), max_size=40))
@example(ids=[0, 0, 3])
def test_pieces_of_any_ids_join_to_the_one_shot_text(demo, ids):
    pieces, _ = stream(demo, ids)
    assert "".join(pieces) == demo.decode(ids)


@settings(deadline=None, max_examples=200)
@given(text=st.text(max_size=30))
@example(text=SAMPLE)
def test_no_piece_splits_a_character(demo, text):
    ids = demo.encode(text)
    pieces, _ = stream(demo, ids)
    assert "".join(pieces) == demo.decode(ids)
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@settings(deadline=None, max_examples=200)
@given(text=st.text(alphabet="ab é漢🙂\n", max_size=30))
@example(text="  ab  b ")
def test_byte_fallback_and_the_leading_space(byte_fallback, text):
    ids = byte_fallback.encode(text)
    pieces, _ = stream(byte_fallback, ids)
    assert "".join(pieces) == byte_fallback.decode(ids) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_unfinished_bytes_come_out_at_the_end(demo):
    ids = demo.encode("ab🙂")[:-1]
    pieces, _ = stream(demo, ids)
    assert "".join(pieces[:-1]) == "ab"
    assert pieces[-1] == "\ufffd"


def test_special_tokens_are_skipped(demo, byte_fallback):
    pieces, _ = stream(byte_fallback, [1, *byte_fallback.encode("a b", special_tokens=False), 2])
    assert "".join(pieces) == "a b"
    assert demo.decode([0, *demo.encode("x = 1"), 2]) == "x = 1"


def test_default_special_tokens_and_leftover_truncation(byte_fallback):
    assert byte_fallback.encode("ab ab ab ab")[0] == 1
    assert byte_fallback.encode("ab ab ab ab", special_tokens=False)[0] != 1
    assert byte_fallback.decode(byte_fallback.encode("ab ab ab ab ab ab")) == "ab ab ab ab ab ab"
    assert byte_fallback.eos_token_id == 2


def test_decoding_stays_linear(demo):
    ids = demo.encode(SAMPLE * 20)
    text = TextStream(demo)
    longest = 0
    for i in ids:
        text.push(i)
        longest = max(longest, len(text._window))
    assert longest < 40


@settings(deadline=None, max_examples=300)
@given(
    text=st.text(alphabet="xyz🙂", max_size=14),
    stop=st.lists(st.text(alphabet="xyz🙂", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_a_stop_string_ends_the_text_at_its_first_token(demo, text, stop):
    ids = demo.encode(text)
    pieces, stopped = stream(demo, ids, stop)
    # the token that completes the first match: the shortest run of ids whose text holds one
    ends = [n for n in range(len(ids) + 1) if any(s in demo.decode(ids[:n]) for s in stop)]
    if not ends:
        assert not stopped
        assert "".join(pieces) == text
        return
    met = demo.decode(ids[: ends[0]])
    cut = min(place for s in stop if (place := met.find(s)) >= 0)
    assert stopped
    assert "".join(pieces) == text[:cut]
    assert "".join(pieces[: ends[0]]) == text[:cut]


def test_text_before_a_possible_stop_string_is_not_delayed(demo):
    text = TextStream(demo, ["END"])
    assert [text.push(i) for i in demo.encode("aEN")][-1] == ""
    assert text.finish() == "EN"
    text = TextStream(demo, ["END"])
    assert "".join(text.push(i) for i in demo.encode("a b")) == "a b"


def test_a_stop_string_that_may_not_stop_yet_comes_out(demo):
    ids = [demo.encode(letter)[0] for letter in "abcbc"]
    text = TextStream(demo, ["bc"])
    pieces = [text.push(token, may_stop=index > 2) for index, token in enumerate(ids)]
    assert ("".join(pieces), text.stopped) == ("abc", True)
    text = TextStream(demo, ["bc"])
    assert "".join(text.push(token, index > 1) for index, token in enumerate(ids[:3])) == "abc"
    assert not text.stopped  # it began before a stop was allowed


def test_without_a_tokenizer_pieces_are_empty():
    text = TextStream(None)
    assert text.push(7) + text.finish() == ""


def test_a_folder_without_a_tokenizer_has_none(tmp_path):
    assert open_tokenizer(tmp_path) is None


def test_a_broken_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a readable tokenizer"):
        open_tokenizer(tmp_path)


def test_a_prompt_that_is_not_unicode_is_refused(demo):
    with pytest.raises(ValueError, match="not valid Unicode"):
        demo.encode("a\udc80b")


def test_chat_needs_a_template(demo):
    assert not has_chat_template(DEMO)
    with pytest.raises(ValueError, match="no chat template"):
        demo.render_chat([{"role": "user", "content": "hi"}])


@pytest.fixture
def chat_folder(tmp_path):
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        "{% if not enable_thinking %}[quiet]{% endif %}"
    )
    (tmp_path / "tokenizer.json").write_bytes((DEMO / "tokenizer.json").read_bytes())
    config = json.loads((DEMO / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text(template)
    return tmp_path


def test_chat_renders_the_template(chat_folder):
    tokenizer = open_tokenizer(chat_folder)
    messages = [{"role": "user", "content": "hi"}]
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render_chat(messages, enable_thinking=True) == text
    assert tokenizer.render_chat(messages) == text + "[quiet]"
    with pytest.raises(ValueError, match=r"refused the messages.*no system"):
        tokenizer.render_chat([{"role": "system", "content": "x"}])


def test_without_tokenizer_json_transformers_opens_the_folder(chat_folder):
    state = json.loads((chat_folder / "tokenizer.json").read_text())
    (chat_folder / "tokenizer.json").unlink()
    (chat_folder / "vocab.json").write_text(json.dumps(state["model"]["vocab"]))
    merges = ["#version: 0.2", *(" ".join(m) for m in state["model"]["merges"])]
    (chat_folder / "merges.txt").write_text("\n".join(merges))
    config = json.loads((chat_folder / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "Qwen2Tokenizer"
    (chat_folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = open_tokenizer(chat_folder)
    ids = tokenizer.encode(SAMPLE)
    assert tokenizer.decode(ids) == SAMPLE
    assert "".join(stream(tokenizer, ids)[0]) == SAMPLE
    assert tokenizer.eos_token_id == 0


def test_opening_the_embedded_tokenizer_does_not_import_transformers():
    code = (
        "import sys; from pathlib import Path; from dspark_jax.text import open_tokenizer;"
        f"open_tokenizer(Path({str(DEMO)!r})).encode('x');"
        "sys.exit('transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

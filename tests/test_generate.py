"""The command line: what goes to which stream, exit codes, one sentence for each mistake."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from dspark_jax import console, generate
from dspark_jax.arguments import DEFAULT_PROMPT
from dspark_jax.generate import gpu_notes, main
from dspark_jax.loading import EMBEDDED, load
from dspark_jax.request import SamplingParams

REFERENCE = json.loads((Path(__file__).parent / "demo" / "reference.json").read_text())
TARGET = str(EMBEDDED / "target")
KEYS = [
    *("prompt", "text", "token_ids", "finish_reason", "prompt_tokens", "rounds"),
    *("acceptance_length", "acceptance_lengths", "proposal_lengths", "seconds"),
    "tokens_per_second",
]


@pytest.fixture(scope="module")
def engines():
    return {}


@pytest.fixture
def command(engines, monkeypatch, tmp_path, capsys):
    """Run the command in this process; engines are kept from one test to the next."""

    def kept(target=None, draft=None, *, report, progress, max_batch, **options):
        key = (target, draft, *sorted(options.items()))
        made = load(target, draft, max_batch=8, report=report, progress=progress, **options)
        return engines.setdefault(key, made)

    monkeypatch.setattr("dspark_jax.loading.load", kept)
    monkeypatch.setattr(generate, "CACHE", tmp_path / "cache")
    monkeypatch.setattr("jax.config.update", lambda *_: None)  # a cache is this test's, not others'

    def run(*arguments):
        code = main(list(arguments))
        streams = capsys.readouterr()
        return code, streams.out, streams.err.splitlines()

    return run


def test_the_default_command_completes_the_default_prompt(command):
    code, out, notes = command("--max-tokens", "96")
    case = REFERENCE["greedy"][0]
    assert case["prompt"] == DEFAULT_PROMPT
    assert code == 0
    tokens = case["output_ids"][len(case["prompt_ids"]) :]
    assert out.rstrip("\n") == load().tokenizer.decode(tokens).rstrip("\n")
    assert all(word in notes[0] for word in ("cpu", "float32", "xla", "memory"))
    assert any("compiled programs are kept in" in note for note in notes)
    assert notes[-1].startswith("96 tokens in ")
    assert notes[-1].endswith("24 rounds, acceptance length 4.04")
    assert "tokens/s" in notes[-1]


def test_json_lines_one_a_prompt_in_order(command, tmp_path):
    cases = [c for c in REFERENCE["greedy"] if c["confidence_threshold"] == 0.5][:3]
    (tmp_path / "prompts").write_text("import os\n\nclass A:\n")
    prompts = [argument for case in cases for argument in ("--prompt", case["prompt"])]
    code, out, notes = command(
        *("--json", "--confidence-threshold", "0.5", "--max-tokens", "96"),
        *prompts,
        *("--prompt-file", str(tmp_path / "prompts")),
    )
    assert code == 0
    objects = [json.loads(line) for line in out.splitlines()]
    assert [entry["prompt"] for entry in objects] == [
        *(case["prompt"] for case in cases),
        "import os",
        "class A:",
    ]
    for case, entry in zip(cases, objects, strict=False):
        assert list(entry) == KEYS
        assert entry["token_ids"] == case["output_ids"][len(case["prompt_ids"]) :]
        assert entry["acceptance_lengths"] == case["acceptance_lengths"]
        assert entry["proposal_lengths"] == case["proposal_lengths"]
        assert entry["rounds"] == len(case["acceptance_lengths"])
        assert entry["acceptance_length"] == pytest.approx(
            sum(case["acceptance_lengths"]) / entry["rounds"]
        )
        assert entry["tokens_per_second"] == pytest.approx(96 / entry["seconds"])
    assert notes[-1].startswith(f"{sum(len(entry['token_ids']) for entry in objects)} tokens")


def test_no_rounds_is_null(command, monkeypatch):
    (first,) = json.loads(command("--json", "--max-tokens", "1")[1])["token_ids"]
    monkeypatch.setattr(
        generate,
        "sampling_options",
        lambda _: {"max_tokens": 5, "stop_token_ids": [first], "seed": 0},
    )
    entry = json.loads(command("--json", "--max-tokens", "1")[1])
    assert (entry["rounds"], entry["acceptance_length"]) == (0, None)
    assert (entry["finish_reason"], entry["text"]) == ("stop", "")
    assert command("--max-tokens", "1")[2][-1].endswith("0 rounds, acceptance length -")


def test_several_texts_are_written_in_order_with_a_line_end_each(command):
    alone = [command("--prompt", text, "--max-tokens", "9")[1] for text in ("import os", "def f")]
    code, out, _ = command("--prompt", "import os", "--prompt", "def f", "--max-tokens", "9")
    assert (code, out) == (0, "".join(alone))
    assert out.endswith("\n")


def test_flags_reach_the_sampler(command):
    flags = ("--temperature", "0.9", "--top-p", "0.9", "--top-k", "50", "--min-p", "0.01")
    seed = ("--seed", "11", "--max-tokens", "20")
    code, out, _ = command("--json", *flags, *seed)
    (result,) = load().generate(
        DEFAULT_PROMPT,
        SamplingParams(max_tokens=20, temperature=0.9, top_p=0.9, top_k=50, min_p=0.01, seed=11),
    )
    assert (code, json.loads(out)["token_ids"]) == (0, result.token_ids)
    assert json.loads(command("--json", *seed)[1])["token_ids"] != result.token_ids
    stopped = json.loads(command("--json", "--stop", "return", "--stop", "zzz")[1])
    assert (stopped["finish_reason"], stopped["text"]) == ("stop", "    ")


def test_controls_and_log_probabilities_reach_the_engine(command):
    flags = ("--max-tokens", "6", "--json", "--logprobs", "2")
    controls = ("--repetition-penalty", "1.5", "--logit-bias", "262=-100", "--min-tokens", "2")
    line = json.loads(command(*flags)[1])
    for token, place in zip(line["token_ids"], line["logprobs"], strict=True):
        assert token == int(next(iter(place)))
    assert all(len(place) in (2, 3) for place in line["logprobs"])
    assert 262 in line["token_ids"]
    other = json.loads(command(*flags, *controls)[1])
    assert 262 not in other["token_ids"]


def test_plain_decoding_gives_the_same_text(command):
    drafted = command("--max-tokens", "30")
    plain = command("--no-draft", "--max-tokens", "30")
    assert plain[1] == drafted[1]
    assert plain[2][-1].endswith("30 rounds, acceptance length 1.00")


def with_template(place):
    """The embedded target with a chat template."""
    template = (
        "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
        "{{ 'think' if enable_thinking }}"
    )
    shutil.copytree(TARGET, place / "target")
    (place / "target" / "chat_template.jinja").write_text(template)
    return place / "target"


def test_chat_puts_the_prompt_into_the_template(command, tmp_path):
    folder = with_template(tmp_path)
    flags = ("--json", "--max-tokens", "2", "--target", str(folder), "--no-draft")
    plain = json.loads(command(*flags, "--prompt", "<|im_start|>hi<|im_end|>")[1])
    quiet = json.loads(command(*flags, "--chat", "--prompt", "hi")[1])
    aloud = json.loads(command(*flags, "--chat", "--enable-thinking", "--prompt", "hi")[1])
    assert quiet["prompt"] == "hi"
    assert quiet["token_ids"] == plain["token_ids"]
    assert quiet["prompt_tokens"] == plain["prompt_tokens"] < aloud["prompt_tokens"]


def test_messages_of_a_file_are_a_conversation(command, tmp_path):
    folder = with_template(tmp_path)
    messages = [
        {"role": "user", "content": "import os"},
        {"role": "assistant", "content": "import sys"},
        {"role": "user", "content": "and re"},
    ]
    file = tmp_path / "messages.json"
    file.write_text(json.dumps([messages, messages[:1]]))
    flags = ("--target", str(folder), "--no-draft", "--messages", str(file), "--max-tokens", "3")
    code, out, _ = command(*flags, "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [json.loads(line["prompt"]) for line in lines] == [messages, messages[:1]]
    assert lines[0]["prompt_tokens"] > lines[1]["prompt_tokens"]
    one = '{"role": "user", "content": "x"}'
    no_content = f"--messages {file}: message 0 has no content"
    cases = {"{": "is not JSON", "[]": "holds no message", '[{"role": "user"}]': no_content}
    for wrong in (*cases, '["text"]', one, "3", f"[[{one}], {one}]"):
        file.write_text(wrong)
        code, _, notes = command(*flags)
        assert code == 2
        assert f"--messages {file}" in notes[-1]
        assert cases.get(wrong, "must be a list of") in notes[-1]
    file.unlink()
    assert f"--messages {file} cannot be read: No such file" in command(*flags)[2][-1]


def test_show_drafts_colours_tokens_by_origin(command, monkeypatch):
    text = command("--max-tokens", "24")[1]
    monkeypatch.setenv("FORCE_COLOR", "1")
    code, out, notes = command("--show-drafts", "--max-tokens", "24")
    assert code == 0
    assert any("green = accepted draft" in note for note in notes)
    assert "\x1b[32m" in out
    assert "\x1b[1;31m" in out
    plain = out
    for code in ("\x1b[32m", "\x1b[1;31m", "\x1b[36m", "\x1b[39m", "\x1b[0m"):
        plain = plain.replace(code, "")
    assert plain == text


MISTAKES = [
    (("--foo",), "unrecognized arguments: --foo"),
    (("--temp", "1"), "unrecognized arguments: --temp 1"),
    (("--temperature", "hot"), "invalid float value: 'hot'"),
    (("--dtype", "float16"), "invalid choice: 'float16'"),
    (("--temperature", "-1"), "temperature cannot be negative"),
    (("--max-tokens", "0"), "max_tokens must be at least 1"),
    (("--max-tokens", "5000"), "max_tokens 5000 that makes 5024, above max_length 4096"),
    (("--draft", "somewhere"), "--draft somewhere has no target; add --target"),
    (("--target", TARGET), "needs --draft DIR, or --no-draft"),
    (("--target", TARGET, "--draft", "x", "--no-draft"), "exclude each other"),
    (("--target", "/no/such", "--no-draft"), "/no/such: no such folder"),
    (("--target", TARGET, "--draft", TARGET), "draft"),
    (("--json", "--show-drafts"), "exclude each other"),
    (("--enable-thinking",), "--enable-thinking does nothing without --chat"),
    (("--chat",), "--chat: the tokenizer of the embedded pair has no chat template"),
    (("--target", ""), "--target is empty"),
    (("--draft", ""), "--draft is empty"),
    (("--draft", "ngram", "--draft-top-k", "3"), "draft_top_k is set, but"),
    (("--draft", "ngram", "--draft-truncation"), "draft_truncation is set, but"),
    (("--draft", "ngram", "--draft-sampling", "greedy"), "draft_sampling is set, but"),
    (("--num-speculative-tokens", "8"), "num_speculative_tokens 8 is not within 1 and the trained"),
    (("--no-draft", "--num-speculative-tokens", "3"), "num_speculative_tokens is set, but there"),
    (("--stop-token-id", "99999999999"), "stop_token_ids must be below 2**31"),
    (("--stop-token-id", "99999"), "stop_token_ids names id 99999, outside the vocabulary"),
    (("--logit-bias", "5=1e39"), "logit_bias must be within -1000 and 1000"),
    (("--chat", "--target", TARGET, "--no-draft"), "no chat template"),
    (("--prompt", ""), "prompt 0 is empty"),
    (("--prompt-file", "/no/such/file"), "--prompt-file /no/such/file cannot be read: No such"),
    (("--prompt-file", ""), "--prompt-file  cannot be read"),
    (("--no-draft", "--confidence-threshold", "0.5"), "confidence_threshold is set, but there is"),
    (("--no-draft", "--block-size", "7"), "block_size cannot be set: there is no draft"),
    (("--target-layer-ids", "1,3"), "2 taps"),
    (("--implementation", "pallas"), "compute capability 9.0"),
    (("--logprobs", "2"), "--logprobs is written by --json only"),
    (("--logprobs", "30", "--json"), "logprobs must be within 0 and 20"),
    (("--logit-bias", "x=1"), "--logit-bias: must be ID=X, a token id and a number, got 'x=1'"),
    (("--logit-bias", "5"), "--logit-bias: must be ID=X, a token id and a number, got '5'"),
    (("--min-tokens", "500"), "min_tokens must be within 0 and max_tokens"),
    (("--messages", "no/such.json"), "--messages: the tokenizer of the embedded pair has no chat"),
    (("--messages", "x.json", "--prompt", "a"), "--messages brings its own prompts"),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES)
def test_a_mistake_is_one_sentence_and_exit_code_2(arguments, words, command, capsys):
    try:
        code, out, notes = command(*arguments)
    except SystemExit as stop:  # argparse's way out
        code, streams = stop.code, capsys.readouterr()
        out, notes = streams.out, streams.err.splitlines()
    assert code == 2
    assert out == ""
    assert words in notes[-1]
    assert notes[-1].startswith("dspark_jax.generate: ")
    assert not any("Traceback" in note for note in notes)


def test_prompt_files(command, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("import os\n"))
    assert json.loads(command("--json", "--max-tokens", "2", "--prompt-file", "-")[1])[
        "prompt"
    ] == ("import os")
    (tmp_path / "empty").write_text("\n \n")
    assert "holds no prompt" in command("--prompt-file", str(tmp_path / "empty"))[2][-1]
    (tmp_path / "latin").write_bytes(b"na\xefve\n")
    code, _, notes = command("--prompt-file", str(tmp_path / "latin"))
    assert (code, "is not UTF-8" in notes[-1]) == (2, True)
    (tmp_path / "marked").write_text("import re\n", encoding="utf-8-sig")
    (tmp_path / "second").write_text("import sys\n")
    files = ("--prompt-file", str(tmp_path / "marked"), "--prompt-file", str(tmp_path / "second"))
    lines = command("--json", "--max-tokens", "2", *files)[1].splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == ["import re", "import sys"]


def test_a_chat_is_refused_before_weights_are_read(command, monkeypatch):
    monkeypatch.setattr("dspark_jax.generate.load_engine", lambda *_, **__: pytest.fail("loaded"))
    assert command("--chat")[0] == 2


@pytest.mark.parametrize("template", ["{{ 1/0 }}", "{% for i in range(10**9) %}{% endfor %}"])
def test_a_template_that_fails_is_named(template, command, tmp_path):
    folder = with_template(tmp_path)
    (folder / "chat_template.jinja").write_text(template)
    code, out, notes = command("--target", str(folder), "--no-draft", "--chat")
    assert (code, out) == (2, "")
    assert f"the chat template of {folder} refused the messages" in notes[-1]


@pytest.mark.parametrize("token", [5, {"content": 7}])
def test_a_tokenizer_whose_stop_token_is_no_text_is_named(token, command, tmp_path):
    folder = with_template(tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
    code, out, notes = command("--target", str(folder), "--no-draft")
    assert (code, out) == (2, "")
    assert "tokenizer_config.json: eos_token" in notes[-1]


def test_characters_that_the_output_lacks_are_escaped(command, tmp_path, monkeypatch):
    (begin,) = (i for i in range(300) if load_tokenizer().id_to_token(i) == "\u00c3")  # of UTF-8
    with (tmp_path / "out").open("w", encoding="ascii") as out:
        monkeypatch.setattr("sys.stdout", out)
        code, _, _ = command("--max-tokens", "2", "--logit-bias", f"{begin}=1000")
    assert code == 0
    assert "\\ufffd" in (tmp_path / "out").read_text()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_an_output_that_is_full_is_a_sentence(flags, command, monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        code, _, notes = command("--max-tokens", "2", *flags)
    assert code == 2
    assert "the output cannot be written: No space left on device" in notes[-1]


def test_an_interrupt_prints_the_summary(command, monkeypatch):
    updates = []

    def interrupted(self):
        updates.append(1)
        if len(updates) == 3:
            raise KeyboardInterrupt
        return written(self)

    written = console.TextPrinter.update
    monkeypatch.setattr(console.TextPrinter, "update", interrupted)
    code, out, notes = command()
    assert code == 130
    assert out.endswith("\n")
    assert notes[-1].split()[0] == "3"  # the first token and two rounds of one each
    assert "2 rounds" in notes[-1]


def test_exhausted_memory_is_a_sentence_and_other_errors_are_bugs(command, monkeypatch):
    def fail(words):
        def update(self):
            raise RuntimeError(words)

        monkeypatch.setattr(console.TextPrinter, "update", update)
        return command()

    code, _, notes = fail("RESOURCE_EXHAUSTED: Out of memory")
    assert code == 2
    assert any("the device ran out of memory; lower --max-length" in note for note in notes)
    with pytest.raises(RuntimeError, match="something else"):
        fail("something else")


def test_where_jax_misses_a_gpu_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    driver = tmp_path / "version"
    assert gpu_notes(driver) == []
    line = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}.65.06  Sun Jul 27 2025\n"
    driver.write_text(line.format(580))
    assert "pip install 'dspark-jax[cuda13]'" in gpu_notes(driver)[0]
    driver.write_text(line.format(550))
    assert "pip install 'dspark-jax[cuda12]'" in gpu_notes(driver)[0]
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert gpu_notes(driver) == []


def test_without_a_home_folder_compiled_programs_are_not_kept(monkeypatch):
    monkeypatch.setattr(generate, "CACHE", Path("~nouser_x/cache"))
    kept = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        note = generate.set_up_jax()[-1]
    finally:
        jax.config.update("jax_compilation_cache_dir", kept)
    assert note.startswith(
        "note: compiled programs are not kept: ~nouser_x/cache: there is no such"
    )


def test_help_names_the_defaults(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--max-tokens 128 --temperature 0 --seed 0 --max-length 4096" in text


def test_arguments_are_read_before_anything_heavy_is_imported():
    code = (
        "import sys; from dspark_jax.generate import main\n"
        "try: main(['--nonsense'])\n"
        "except SystemExit: pass\n"
        "heavy = {'jax', 'numpy', 'flax', 'orbax', 'transformers', 'tokenizers', 'rich'}\n"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def load_tokenizer():
    import tokenizers

    return tokenizers.Tokenizer.from_file(str(EMBEDDED / "target" / "tokenizer.json"))


def run_process(arguments, cache, **options):
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(cache)}
    return subprocess.Popen(
        [sys.executable, "-m", "dspark_jax.generate", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


@pytest.fixture
def heeds_ctrl_c():
    """A job in a shell's background ignores the signal, and so would all that it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_the_process_keeps_compiled_programs_stops_on_ctrl_c_and_survives_a_closed_pipe(tmp_path):
    cache = tmp_path / "cache"
    with run_process(["--max-tokens", "8"], cache) as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    assert out.startswith("    return")
    assert "Warning" not in err
    assert err.splitlines()[0].startswith("cpu")
    assert f"compiled programs are kept in {cache}" in err
    assert any(cache.iterdir())

    with run_process(["--max-tokens", "4000"], cache) as process:
        assert process.stdout.readline()
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        err = process.communicate()[1]
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "tokens/s" in err.splitlines()[-1]

    with run_process(["--max-tokens", "4000"], cache) as process:
        process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()
    assert "Traceback" not in err
    assert "Exception ignored" not in err
    assert process.returncode == 128 + signal.SIGPIPE


def test_a_strangers_convert_is_named_by_the_command(tmp_path):
    (tmp_path / "convert.py").write_text("raise SystemExit('a stranger ran')\n")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-m", "dspark_jax.generate"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert str(tmp_path / "convert.py") in done.stderr
    assert "a stranger ran" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_long_prompt_is_counted_on_a_terminal(command, monkeypatch):
    text = "def f(x):\n    return x\n" * 12
    flags = ("--prompt", text, "--max-tokens", "8")
    _, out, notes = command(*flags)
    assert "prompt:" not in "".join(notes)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    code, same, notes = command(*flags)
    assert (code, same) == (0, out)
    written = "\n".join(notes)
    counted = [int(n) for n in re.findall(r"prompt: (\d+) of \d+ tokens\x1b\[K", written)]
    total = int(re.search(r"of (\d+) tokens", written)[1])
    assert counted == list(range(64, total, 64))  # chunks of a CPU; the last takes the line away
    assert counted
    assert "prompt:" not in "".join(command("--max-tokens", "8")[2])  # a prompt of one chunk


def test_a_line_that_was_interrupted_is_taken_away():
    out = io.StringIO()
    line = console.PromptLine(out, 4)
    token = SimpleNamespace(block_until_ready=lambda: None)
    request = SimpleNamespace(prompt_ids=[0] * 9, prefilled=4)
    line(request, token)
    assert out.getvalue() == ""  # nothing has run yet
    request.prefilled = 8
    line(request, token)
    assert out.getvalue() == "\rprompt: 4 of 9 tokens\x1b[K"
    line.close()
    line.close()
    assert out.getvalue().endswith("tokens\x1b[K\r\x1b[K")
    short = SimpleNamespace(prompt_ids=[0] * 4, prefilled=4)
    before = out.getvalue()
    line(short, token)
    assert out.getvalue() == before

"""The README's examples run as printed, and its facts are the program's."""

import re
from pathlib import Path

from bench.__main__ import main as bench
from convert.__main__ import main as convert
from dspark_jax import SamplingParams, load
from dspark_jax.generate import build_parser

README_FILE = Path(__file__).parent.parent / "README.md"
README = README_FILE.read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
OF_OTHERS = {  # of convert, of bench, and of XLA
    *("--check", "--out", "--draft", "--export-stablehlo", "--platforms", "--torch"),
    "--xla_force_host_platform_device_count",
}
COMMANDS = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)


def test_the_engine_example(capsys):
    exec(EXAMPLES[0], {})
    out = capsys.readouterr().out
    assert "length [" in out
    assert out.strip()


def test_the_example_without_the_engine_gives_the_engines_tokens(capsys):
    names: dict = {}
    exec(EXAMPLES[1], names)
    (result,) = load(max_batch=1).generate("def fibonacci(n):\n", SamplingParams(max_tokens=32))
    assert names["tokens"][:32] == result.token_ids
    assert capsys.readouterr().out == result.text + "\n"
    assert len(EXAMPLES) == 4


def test_the_example_of_many_requests(capsys):
    names: dict = {}
    exec(EXAMPLES[2], names)
    result = names["request"].result()
    out = capsys.readouterr().out
    assert result.finish_reason == "length"
    assert out.startswith("1 None\n")
    assert f"32 length\n{result.text}\n" in out


def test_the_set_up_commands_are_two_single_lines():
    first, second = (command.splitlines() for command in COMMANDS[:2])
    assert len(first) == len(second) == 1
    assert first[0].endswith(".venv/bin/python -m dspark_jax.generate")
    assert second[0].endswith(".venv/bin/python -m pytest -q -n 2")


def test_the_defaults_in_the_table_are_the_parsers():
    defaults = vars(build_parser().parse_args([]))
    rows = re.findall(r"^\| `--([\w-]+)` \| `?([\w.]+)`? \|", README, re.MULTILINE)
    stated = {name.replace("-", "_"): value for name, value in rows}
    for name in ("max_tokens", "seed", "max_length", "rejection"):
        assert str(defaults[name]) == stated[name]
    assert float(stated["confidence_threshold"]) == defaults["confidence_threshold"]
    assert float(stated["temperature"]) == SamplingParams().temperature
    flags = set(re.findall(r"--[a-z][\w-]+", re.sub(r"-m bench .*", "", README)))
    assert flags - OF_OTHERS <= set(build_parser()._option_string_actions)
    assert defaults["tensor_parallel"] == defaults["data_parallel"] == 1


def test_the_bench_command_writes_its_report(monkeypatch, tmp_path):
    (command,) = (line for block in COMMANDS for line in block.splitlines() if "-m bench" in line)
    monkeypatch.chdir(tmp_path)
    assert bench(command.split("-m bench ")[1].split()) == 0
    assert "data:image/svg+xml" in (tmp_path / "report.html").read_text()


def test_the_exported_pair_runs(monkeypatch, tmp_path, capsys):
    (command,) = (line for block in COMMANDS for line in block.splitlines() if "-m convert" in line)
    words = command.split("-m convert ")[1].split()
    demo = str(README_FILE.parent / "dspark_jax")
    monkeypatch.chdir(tmp_path)
    assert convert([word.replace("dspark_jax", demo, 1) for word in words]) == 0
    exec(EXAMPLES[3], {})
    assert capsys.readouterr().out.strip()

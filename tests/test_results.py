"""Measured records: each can be read, and its command still exists."""

import json
import re
from importlib import import_module
from pathlib import Path

import pytest

RESULTS = Path(__file__).parent.parent / "bench" / "results"
README = (RESULTS / "README.md").read_text().replace("\n", " ")


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.jsonl")), ids=lambda file: file.stem)
def test_lines_name_their_bench_and_the_table_their_command(file):
    benches = {json.loads(line)["bench"] for line in file.read_text().splitlines()}
    assert len(benches) == 1
    assert f"`{file.name}`" in README
    assert f"python -m bench {benches.pop()}" in README


@pytest.mark.parametrize("command", re.findall(r"`python -m bench ([^`]+)`", README))
def test_commands_are_taken(command):
    name, *flags = command.replace("FILE", "/tmp/x").split()
    module = import_module(f"bench.{name}")
    assert module.build_parser().parse_args(flags)

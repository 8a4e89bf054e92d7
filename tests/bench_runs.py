"""Bench commands run in the test's process, on engines that are kept from one test to the next."""

import json

import pytest

from bench.__main__ import main
from dspark_jax.loading import load

ENGINES = {}


def kept_load(target=None, draft=None, *, report, max_batch, **options):
    """`load` with a batch of 4 and without repetition."""
    key = (str(target), str(draft), *sorted(options.items()))
    if key not in ENGINES:
        ENGINES[key] = load(target, draft, report=report, max_batch=4, **options)
    return ENGINES[key]


def embedded_engine():
    """The engine of the embedded pair that commands have used with their default options."""
    return next(engine for (_, draft, *_), engine in ENGINES.items() if draft.endswith("draft"))


@pytest.fixture
def bench(monkeypatch, tmp_path, capsys):
    """Run a command; returns its exit code, both streams, and its JSON (None where it failed)."""
    monkeypatch.setattr("bench.pairs.load", kept_load)
    monkeypatch.setattr("bench.pairs.set_up_jax", list)
    monkeypatch.setenv("COLUMNS", "160")

    def run(command, *arguments):
        path = tmp_path / "measured.json"
        path.unlink(missing_ok=True)
        # all of a short cache is one compiled attention
        short = () if "--max-length" in arguments else ("--max-length", "240")
        code = main([command, *map(str, arguments), *short, "--json", str(path)])
        streams = capsys.readouterr()
        return code, streams.out, streams.err, json.loads(path.read_text()) if not code else None

    return run

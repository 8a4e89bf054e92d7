"""Every kind of prompt file, SPEED-Bench's fields and splits, and one sentence for each mistake."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bench.datasets import PLACEHOLDER, SUBSETS, read_conversations, select

CATEGORIES = (
    *("coding", "humanities", "math", "multilingual", "qa", "rag", "reasoning", "roleplay"),
    *("stem", "summarization", "writing"),
)
FIELDS = ("question_id", "category", "sub_category", "turns", "source", "src_id", "difficulty")


def speed_row(index, category, turns, **changes):
    row = {
        "question_id": f"{index:032x}",
        "category": category,
        "sub_category": "python" if category == "coding" else "",
        "turns": turns,
        "source": "hub.example/set",
        "src_id": f"set_{index}",
        "difficulty": "easy",
        "multiturn": len(turns) > 1,
    }
    return row | changes


def write_parquet(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


@pytest.fixture
def speed_folder(tmp_path):
    """A made SPEED-Bench: eleven categories with two rows each, and one throughput split."""
    rows = [
        speed_row(2 * i + j, name, ["def f(x):", "def g(x):"][: 1 + j])
        for i, name in enumerate(CATEGORIES)
        for j in range(2)
    ]
    write_parquet(tmp_path / "speed" / "qualitative" / "test.parquet", rows)
    tiers = ("low_entropy", "mixed", "high_entropy")
    rows = [speed_row(i, name, ["import os\n" * 20]) for i, name in enumerate(tiers)]
    write_parquet(tmp_path / "speed" / "throughput_1k" / "test.parquet", rows)
    return tmp_path / "speed"


def test_a_speed_bench_folder(speed_folder):
    found = read_conversations(speed_folder)
    assert len(found) == 22
    assert tuple(dict.fromkeys(one.category for one in found)) == CATEGORIES
    assert {one.subset for one in found} == {"qualitative"}
    expected = speed_row(1, "coding", ["def f(x):", "def g(x):"])
    for name in FIELDS:
        value = getattr(found[1], name)
        assert (list(value) if name == "turns" else value) == expected[name]
    assert found[1].multiturn
    assert not found[0].multiturn
    both = read_conversations(speed_folder, ["throughput_1k", "qualitative"])
    assert [one.subset for one in both] == ["throughput_1k"] * 3 + ["qualitative"] * 22
    assert [one.category for one in both[:3]] == ["low_entropy", "mixed", "high_entropy"]
    assert len(read_conversations(speed_folder / "throughput_1k")) == 3
    with pytest.raises(ValueError, match=r"no subset throughput_8k: it holds .*prepare_data\.py"):
        read_conversations(speed_folder, ["throughput_8k"])
    assert len(SUBSETS) == 6


def test_jsonl_text_and_messages(tmp_path):
    rows = [
        {"turns": ["a", "b"]},
        {"prompt": "c", "category": "own"},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "d"}]},
    ]
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_conversations(path)
    assert [one.turns for one in found] == [("a", "b"), ("c",), ("d",)]
    assert [one.question_id for one in found] == ["0", "1", "2"]
    assert found[1].category == "own"
    (tmp_path / "own.json").write_text(json.dumps(rows))
    assert read_conversations(tmp_path / "own.json") == found
    for name in ("own.jsonl", "own.json"):  # as an editor on Windows saves it
        (tmp_path / name).write_text((tmp_path / name).read_text(), encoding="utf-8-sig")
        assert read_conversations(tmp_path / name) == found
    (tmp_path / "set").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / "set" / name).write_text(path.read_text())
    ids = [one.question_id for one in read_conversations(tmp_path / "set")]
    assert ids == [str(i) for i in range(6)]
    (tmp_path / "own.txt").write_text("one\n\ntwo\n", encoding="utf-8-sig")
    assert [one.turns for one in read_conversations(tmp_path / "own.txt")] == [("one",), ("two",)]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", '{"turns": ["x"]}\nnot json\n', r"a\.jsonl, line 2 is not valid JSON"),
        ("a.jsonl", "[" * 10**6, r"a\.jsonl, line 1 is not valid JSON: .*recursion"),
        ("a.json", "[" * 10**6, r"a\.json is not valid JSON: .*recursion"),
        ("a.json", '[{"turns": ["x"]}, 3]', r"a\.json, row 1 must be an object"),
        ("a.jsonl", '\n{"question": "x"}\n', r"a\.jsonl, line 2 needs `turns`"),
        ("a.jsonl", '{"turns": []}\n', r"line 1 needs `turns`"),
        ("a.jsonl", '{"turns": [1]}\n', r"line 1 needs `turns`"),
        ("a.jsonl", '{"messages": "abc"}', r"line 1: messages must be a list of .* got 'abc'"),
        ("a.jsonl", '{"messages": [1]}', r"line 1: messages must be a list of .* got \[1\]"),
        ("a.jsonl", "[1]\n", "must be an object"),
        ("a.jsonl", "", "holds no prompt"),
        ("a.csv", "x", "cannot read .csv"),
        ("a.parquet", "x" * 20, "not a readable parquet file"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=words):
        read_conversations(tmp_path / name)


def test_a_place_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"no such file or folder.*prepare_data\.py"):
        read_conversations(tmp_path / "nothing")
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match="has no subsets"):
        read_conversations(tmp_path / "a.txt", ["qualitative"])


def test_placeholders_are_refused_only_where_they_are_wanted(tmp_path):
    rows = [speed_row(0, "coding", ["x"]), speed_row(1, "rag", [f"{PLACEHOLDER} USING X\n\n{{q}}"])]
    write_parquet(tmp_path / "test.parquet", rows)
    found = read_conversations(tmp_path)
    with pytest.raises(ValueError, match=r"1 of 2 prompts are placeholders.*prepare_data\.py"):
        select(found)
    assert len(select(found, categories=["coding"])) == 1


def test_selection(speed_folder):
    found = read_conversations(speed_folder, ["qualitative", "throughput_1k"])
    assert select(found) == found
    assert {one.category for one in select(found, categories=["qa", "rag"])} == {"qa", "rag"}
    assert {one.category for one in select(found, sub_categories=["python"])} == {"coding"}
    with pytest.raises(ValueError, match="no category poetry; there are: coding, "):
        select(found, categories=["poetry"])
    with pytest.raises(ValueError, match="no sub_category perl; there are: python"):
        select(found, sub_categories=["perl"])
    shuffled = select(found, most=2, shuffle_seed=1)
    assert [one.subset for one in shuffled].count("qualitative") == 2
    assert len(shuffled) == 4
    assert shuffled == select(found, most=2, shuffle_seed=1)
    assert shuffled != select(found, most=2, shuffle_seed=2)

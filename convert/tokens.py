"""What a checkpoint folder says of its tokens: stop ids, and the files a tokenizer needs."""

from __future__ import annotations

import filecmp
import shutil
from pathlib import Path
from typing import Any

from convert.headers import read_json
from convert.problems import CheckpointError

MAX_STOP_IDS = 64
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
)
TEMPLATE_FOLDER = "additional_chat_templates"
# The tokenizer library looks at config.json for the model type where its own file has no class.
COPIED_FILES = (*TOKENIZER_FILES, "generation_config.json", "config.json")


def stop_token_ids(folder: str | Path) -> tuple[int, ...]:
    """Return the ids that end a text: generation_config, then config, then the tokenizer.

    Each may hold one id or a list; the first that holds any decides. Empty where none does.
    Raises CheckpointError where one is malformed.
    """
    folder = Path(folder)
    for name in ("generation_config.json", "config.json"):
        found = _read(folder, name).get("eos_token_id")
        if found is not None:
            return _checked(found, f"{folder}: {name}: eos_token_id")
    found = _tokenizer_stop(folder)
    return () if found is None else (found,)


def _read(folder: Path, name: str) -> dict[str, Any]:
    if not (folder / name).exists():
        return {}
    try:
        return read_json(folder / name)
    except ValueError as error:
        raise CheckpointError(str(error), str(folder)) from None


def _checked(found: Any, where: str) -> tuple[int, ...]:
    ids = found if isinstance(found, list) else [found]
    if not all(type(i) is int and 0 <= i < 1 << 31 for i in ids) or len(ids) > MAX_STOP_IDS:
        raise CheckpointError(
            f"must be a token id or a list of at most {MAX_STOP_IDS}, got {str(found)[:60]}", where
        )
    return tuple(dict.fromkeys(ids))


def _tokenizer_stop(folder: Path) -> int | None:
    token = _read(folder, "tokenizer_config.json").get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    return token_ids(folder).get(token) if isinstance(token, str) else None


def token_ids(folder: Path) -> dict[str, int]:
    """Return token -> id from tokenizer.json, added tokens included (empty without the file)."""
    tree = _read(folder, "tokenizer.json")
    model = tree.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids = dict(vocab) if isinstance(vocab, dict) else {}
    if isinstance(vocab, list):  # Unigram: a list of [token, score]
        ids = {pair[0]: i for i, pair in enumerate(vocab) if isinstance(pair, list) and pair}
    added = tree.get("added_tokens")
    for entry in added if isinstance(added, list) else []:
        if isinstance(entry, dict) and isinstance(entry.get("content"), str):
            ids[entry["content"]] = entry.get("id")
    return {token: i for token, i in ids.items() if type(i) is int}


def compare_tokenizers(target: Path, draft: Path) -> tuple[str, bool, bool]:
    """Hold the draft's tokenizer.json, where it brings one, against the target's.

    Returns what was found in words, whether the two differ, and whether they differ by more than
    a few added tokens.
    """
    first, second = target / "tokenizer.json", draft / "tokenizer.json"
    if not (first.is_file() and second.is_file()):
        return "not compared: the draft or the target brings none", False, False
    if filecmp.cmp(first, second, shallow=False):
        return "the same file", False, False
    ours, theirs = token_ids(target), token_ids(draft)
    moved = [token for token, i in theirs.items() if ours.get(token, i) != i]
    strange = [token for token in theirs if token not in ours]
    words = f"{len(moved)} tokens with another id, {len(strange)} that the target does not know"
    few = max(32, len(ours) // 1000)
    return words, bool(moved or strange), len(moved) + len(strange) > few


def copy_token_files(source: Path, folder: Path) -> list[str]:
    """Copy tokenizer, chat template, generation settings and config; return their names."""
    names = [name for name in COPIED_FILES if (source / name).is_file()]
    for name in names:
        shutil.copyfile(source / name, folder / name)
    for template in sorted((source / TEMPLATE_FOLDER).glob("*.jinja")):
        (folder / TEMPLATE_FOLDER).mkdir(exist_ok=True)
        shutil.copyfile(template, folder / TEMPLATE_FOLDER / template.name)
        names.append(f"{TEMPLATE_FOLDER}/{template.name}")
    return names

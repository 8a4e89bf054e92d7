"""A local folder or a hub repository id -> a local folder, through `huggingface_hub`.

Configs, tokenizer and safetensors only: no code is fetched, and none would be run.
"""

from __future__ import annotations

import re
from pathlib import Path

from convert.headers import INDEX, SINGLE, read_json
from convert.problems import CheckpointError
from convert.tokens import TEMPLATE_FOLDER, TOKENIZER_FILES
from dspark_jax.files import expand

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w-][\w.-]{0,95}", re.ASCII)
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    INDEX,
    *TOKENIZER_FILES,
    f"{TEMPLATE_FOLDER}/*.jinja",
)


def resolve_folder(name: str | Path) -> Path:
    """Return the folder of a checkpoint; a local folder wins over a hub id of the same name.

    `HF_HOME`, `HF_HUB_OFFLINE` and the like work as everywhere. Raises CheckpointError with one
    sentence where the name is neither, or the hub cannot be reached.
    """
    path = expand(name, CheckpointError)
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError("is a file; give the folder that holds config.json", str(name))
    if not REPOSITORY.fullmatch(str(name)):
        raise CheckpointError(
            "no such folder, and not a hub repository id of the form owner/name", str(name)
        )
    return _download(str(name))


def _download(repository: str) -> Path:
    folder = _snapshot(repository, None, SMALL_FILES)
    weights: tuple[str, ...] = (SINGLE,)
    if (folder / INDEX).exists():
        try:
            listed = read_json(folder / INDEX).get("weight_map")
        except ValueError as error:
            raise CheckpointError(str(error), repository) from None
        names = set(listed.values()) if isinstance(listed, dict) else set()
        # A name with wildcards or folders is left to the reader, which refuses it.
        weights = tuple(sorted(n for n in names if re.fullmatch(r"[\w.-]+\.safetensors", str(n))))
    # The first call's commit, so that both calls see one state of the repository.
    return _snapshot(repository, folder.name, weights)


def _snapshot(repository: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    import huggingface_hub
    from huggingface_hub import constants, errors

    try:
        return Path(
            huggingface_hub.snapshot_download(
                repository, revision=revision, allow_patterns=list(patterns)
            )
        )
    except (errors.GatedRepoError, errors.RepositoryNotFoundError):
        reason = "is no hub repository you can read: check the name, or log in (hf auth login)"
    except errors.LocalEntryNotFoundError:
        online = not constants.HF_HUB_OFFLINE
        state = "the hub cannot be reached" if online else "offline mode is on (HF_HUB_OFFLINE)"
        reason = (
            f"no such folder, not complete in the local cache, and {state}: go online, or give the"
            " folder of a downloaded copy"
        )
    except Exception as error:  # the libraries below raise their own kinds for a broken network
        first = (str(error).splitlines() or [type(error).__name__])[0][:200]
        reason = f"could not be fetched from the hub ({first})"
    raise CheckpointError(reason, repository)

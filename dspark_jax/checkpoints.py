"""Checkpoints as loading takes them: understood, held against each other, and not read yet."""

from __future__ import annotations

from dspark_jax.shadow import refuse_shadows

refuse_shadows("convert")  # before the imports below could run a stranger's file of that name

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Literal

import jax
from jax.sharding import Mesh

from convert import apply, store
from convert.hub import resolve_folder
from convert.packaging import (
    DraftOverrides,
    DraftSource,
    TargetSource,
    read_draft,
    read_target,
    share_with_target,
)
from convert.tokens import stop_token_ids
from dspark_jax.config import DraftConfig, NgramConfig, TargetConfig
from dspark_jax.sharding import arrange_params, param_shardings, place_param
from dspark_jax.state import Params

__all__ = ["EMBEDDED", "Checkpoint", "DraftOverrides", "open_checkpoint"]

EMBEDDED = Path(__file__).parent / "demo"
NGRAM = "ngram"  # the name of prompt lookup where a draft is named

Dtype = Literal["float32", "bfloat16"]
Place = str | Path
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Checkpoint:
    """Networks that were understood and not read yet."""

    target: TargetConfig
    draft: DraftConfig | NgramConfig | None
    folder: Path  # tokenizer and generation settings
    stop_ids: tuple[int, ...]
    warnings: tuple[str, ...]
    read: Callable[[Dtype, Progress | None, Mesh | None], Params]
    share: Callable[[], Checkpoint] | None = None  # compare the draft's copies with the target's
    store: Path | None = None  # the folder of a converted store


def open_checkpoint(
    target: Place | None, draft: Place | Literal[False] | None, overrides: DraftOverrides
) -> Checkpoint:
    """Understand what a target and a draft name, each a folder, a store or a hub id.

    Raises ValueError (CheckpointError among them) with what is wrong; no weight is read.
    """
    if draft == NGRAM:
        _refuse_overrides(overrides, "prompt lookup has no file")
        return replace(open_checkpoint(target, False, overrides), draft=NgramConfig())
    if target is None:
        if draft:
            raise ValueError(f"the draft {draft} has no target; name its target too")
        folders = (EMBEDDED / "target", None if draft is False else EMBEDDED / "draft")
        return _open_folders(*folders, overrides)
    folder = resolve_folder(target)
    if not store.is_store(folder):
        return _open_folders(folder, resolve_folder(draft) if draft else None, overrides)
    if draft:
        raise ValueError(
            f"{target} is a converted store and brings its own draft; leave {draft} out"
        )
    _refuse_overrides(overrides, f"{target} is a converted store, where they are settled")
    return _open_store(folder, draft is not False)


def _open_folders(target: Path, draft: Path | None, overrides: DraftOverrides) -> Checkpoint:
    source = read_target(target)
    if draft is None:
        _refuse_overrides(overrides, "there is no draft")
        return _pair(source, None)
    unshared = read_draft(draft, source, overrides)
    return replace(
        _pair(source, unshared), share=lambda: _pair(source, share_with_target(unshared, source))
    )


def _refuse_overrides(overrides: DraftOverrides, reason: str) -> None:
    given = [
        field.name for field in fields(overrides) if getattr(overrides, field.name) is not None
    ]
    if given:
        raise ValueError(f"{', '.join(given)} cannot be set: {reason}; leave it out")


def _pair(target: TargetSource, draft: DraftSource | None) -> Checkpoint:
    def read(dtype: Dtype, progress: Progress | None, mesh: Mesh | None) -> Params:
        sizes = [apply.param_bytes(source, dtype) for source in (target, draft) if source]

        def advance(before: int) -> Progress | None:
            return progress and (lambda done, _: progress(before + done, sum(sizes)))

        def placed(source: TargetSource | DraftSource) -> apply.Place | None:
            return partial(place_param, mesh, source.config.layers) if mesh else None

        params = {"target": apply.load_target_params(target, dtype, advance(0), placed(target))}
        if draft:
            read_draft = apply.load_draft_params
            params["draft"] = read_draft(draft, dtype, advance(sizes[0]), placed(draft))
        return params

    return Checkpoint(
        target=target.config,
        draft=draft.config if draft else None,
        folder=target.folder,
        stop_ids=stop_token_ids(target.folder),
        warnings=target.warnings + (draft.warnings if draft else ()),
        read=read,
    )


def _open_store(folder: Path, with_draft: bool) -> Checkpoint:
    header = store.read_store(folder)

    def read(dtype: Dtype, progress: Progress | None, mesh: Mesh | None) -> Params:
        places = param_shardings(store.abstract_params(header, dtype), mesh) if mesh else None
        params, _ = store.restore(folder, dtype=dtype, draft=with_draft, sharding=places)
        if mesh:
            layers = {"target": header.target.layers}
            if header.draft:
                layers["draft"] = header.draft.layers
            params = {name: arrange_params(tree, layers[name]) for name, tree in params.items()}
        if progress:  # Orbax tells nothing on the way
            size = sum(x.nbytes for x in jax.tree.leaves(params))
            progress(size, size)
        return params

    return Checkpoint(
        target=header.target,
        draft=header.draft if with_draft else None,
        folder=folder,
        stop_ids=header.stop_token_ids,
        warnings=(),
        read=read,
        store=folder,
    )

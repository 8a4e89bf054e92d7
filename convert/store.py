"""The converted form: an Orbax checkpoint with its configs and tokenizer beside it.

STORE/dspark_store.json   version, dtype, configs, stop ids, where it came from
STORE/params/             Orbax; what a mesh splits is written in PARTS, which devices read apart
STORE/tokenizer.json ...  copied from the target's folder
"""

from __future__ import annotations

import dataclasses
import json
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from convert.apply import DTYPES, Dtype, Params, put
from convert.headers import read_json
from convert.names import MAPS, Plan, draft_plan, target_plan
from convert.problems import CheckpointError, raise_problems
from convert.sources import STORE_FILE
from convert.tokens import copy_token_files, stop_token_ids
from dspark_jax.config import DraftConfig, TargetConfig
from dspark_jax.folders import check_unused
from dspark_jax.sharding import DATA, TENSOR, param_sharding

VERSION = 1
PARAMS = "params"
PARTS = 8


@dataclass(frozen=True)
class StoreHeader:
    """What a store holds, without its weights; `draft` is None for a target alone."""

    folder: Path
    dtype: Dtype
    target: TargetConfig
    draft: DraftConfig | None
    stop_token_ids: tuple[int, ...]
    origin: dict[str, Any]


def is_store(folder: str | Path) -> bool:
    """Whether a folder is a converted store rather than a checkpoint."""
    return (Path(folder) / STORE_FILE).is_file()


def save(
    folder: str | Path,
    params: Params,
    target: TargetConfig,
    draft: DraftConfig | None = None,
    *,
    token_files: str | Path,
    origin: dict[str, Any] | None = None,
) -> None:
    """Write `{"target": ..., "draft": ...}` parameters as a store in a new or empty folder.

    `token_files` is the target's folder: tokenizer, chat template, generation settings and stop
    ids come from it; `origin` is kept as it is given. The header is written last, so that a folder
    with one is complete. Raises CheckpointError where the folder is in use.
    """
    import orbax.checkpoint as ocp  # a second of imports that only conversion needs

    check_unused(folder, CheckpointError)
    folder = Path(folder).absolute()
    dtypes = {str(x.dtype) for x in jax.tree.leaves(params) if x.dtype != "int32"}
    header = {
        "version": VERSION,
        "dtype": dtypes.pop() if len(dtypes) == 1 else sorted(dtypes),
        "target": dataclasses.asdict(target),
        "draft": None if draft is None else dataclasses.asdict(draft),
        "stop_token_ids": stop_token_ids(token_files),
        "origin": origin or {},
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / PARAMS, params)
        copy_token_files(Path(token_files), folder)
        (folder / STORE_FILE).write_text(json.dumps(header, indent=2) + "\n")
    except OSError as error:
        raise CheckpointError(f"cannot be written ({error.strerror})", str(folder)) from None


def split_host() -> None:
    """Let jax see the host as several devices, one a part; before anything else asks for one."""
    jax.config.update("jax_num_cpu_devices", PARTS)


def place_in_parts(name: str, buffer: np.ndarray) -> jax.Array:
    """A parameter on the host, in parts where a mesh would split it and `split_host` was called.

    Orbax writes the parts as they lie, so that a device later reads no more than its own.
    """
    hosts = jax.devices("cpu")
    if len(hosts) >= PARTS:
        mesh = Mesh(np.array(hosts[:PARTS]).reshape(1, PARTS), (DATA, TENSOR))
        place = param_sharding(name, buffer.ndim, mesh)
        if not place.is_fully_replicated and buffer.shape[place.spec.index(TENSOR)] % PARTS == 0:
            return jax.device_put(buffer, place)
    return jax.device_put(buffer, hosts[0])


def read_store(folder: str | Path) -> StoreHeader:
    """Read a store's header; raises CheckpointError where it is absent or not understood."""
    folder = Path(folder)
    if not is_store(folder):
        raise CheckpointError(f"holds no {STORE_FILE}: not a complete store", str(folder))
    try:
        tree = read_json(folder / STORE_FILE)
        if tree.get("version") != VERSION:
            raise ValueError(
                f"{STORE_FILE}: version {tree.get('version')}, this program reads {VERSION}:"
                " convert the checkpoint again"
            )
        dtype = tree["dtype"]
        if dtype not in ("float32", "bfloat16"):
            raise ValueError(f"{STORE_FILE}: dtype {dtype} is not float32 or bfloat16")
        draft = tree["draft"]
        return StoreHeader(
            folder,
            dtype,
            _rebuild(TargetConfig, tree["target"]),
            None if draft is None else _rebuild(DraftConfig, draft),
            tuple(tree["stop_token_ids"]),
            dict(tree["origin"]),
        )
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{error}; convert the checkpoint again", str(folder)) from None


def _rebuild(kind: type, tree: Any) -> Any:
    """Return the frozen config that `dataclasses.asdict` wrote; unknown fields raise."""
    hints = typing.get_type_hints(kind)
    made = {}
    for name, value in dict(tree).items():
        hint = hints.get(name)
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            value = _rebuild(hint, value)
        elif isinstance(value, list):
            value = tuple(value)
        made[name] = value
    return kind(**made)


def store_plan(header: StoreHeader) -> dict[str, Plan]:
    """Return the parameters that a store's configs ask for, by network."""
    plans = {"target": target_plan(header.target)}
    return plans if header.draft is None else {**plans, "draft": draft_plan(header.draft)}


def abstract_params(header: StoreHeader, dtype: Dtype, sharding: Any = None) -> Params:
    """Return the parameter tree of a store as `jax.ShapeDtypeStruct`s with their shardings.

    `sharding` is one sharding for all, a tree of them by network and name, or None: the default
    device.
    """
    whole: Any = sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params: Params = {}
    for network, plan in store_plan(header).items():
        for name, entry in plan.items():
            path = f"{network}.{name}"
            place = whole
            for key in path.split(".") if isinstance(whole, dict) else ():
                place = place[key]
            kind = jax.numpy.int32 if name in MAPS else DTYPES[dtype]
            put(params, path, jax.ShapeDtypeStruct(entry.shape, kind, sharding=place))
    return params


def restore(
    folder: str | Path, *, dtype: Dtype | None = None, draft: bool = True, sharding: Any = None
) -> tuple[Params, StoreHeader]:
    """Read a store's parameters, bit for bit what was saved (cast where another dtype is asked).

    The shapes come from the configs, so weights that do not fit them raise CheckpointError.
    `draft=False` leaves the draft out. `sharding` is one sharding for all, or a tree of them in
    the shape of the parameters; without it everything goes to the default device.
    """
    import orbax.checkpoint as ocp

    header = read_store(folder)
    wanted = abstract_params(header, dtype or header.dtype, sharding)
    if not draft:
        wanted.pop("draft", None)
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            path = Path(folder).absolute() / PARAMS
            held = checkpointer.metadata(path).item_metadata.tree
            _check_shapes(wanted, held if draft else {"target": held["target"]})
            params = checkpointer.restore(
                path,
                args=ocp.args.PyTreeRestore(
                    item=wanted,
                    restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
                    partial_restore=not draft,
                ),
            )
    except CheckpointError as error:
        raise CheckpointError(error.problems, str(folder)) from None
    except Exception as error:  # Orbax and TensorStore raise many kinds
        first = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise CheckpointError(f"the weights cannot be restored ({first})", str(folder)) from None
    return params, header


def _check_shapes(wanted: Params, held: Params) -> None:
    """Hold the stored tree against the configs first: a failed restore leaves threads behind."""
    shapes, stored = (
        {jax.tree_util.keystr(path, simple=True, separator="."): tuple(x.shape) for path, x in flat}
        for flat in map(jax.tree_util.tree_leaves_with_path, (wanted, held))
    )
    names = sorted(shapes.keys() | stored.keys())
    raise_problems(
        [
            f"{PARAMS}: {name}: stored with shape {stored.get(name)}, the configs ask for"
            f" {shapes.get(name)}"
            for name in names
            if shapes.get(name) != stored.get(name)
        ]
    )

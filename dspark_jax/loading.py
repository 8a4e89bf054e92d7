"""load(): checkpoints to an engine. The only place where conversion meets the engine."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from jax.sharding import Mesh

# First of ours: it refuses a stranger's `convert` before anything could run it.
from dspark_jax.checkpoints import (
    EMBEDDED,
    Checkpoint,
    DraftOverrides,
    Dtype,
    Place,
    Progress,
    open_checkpoint,
)
from dspark_jax.config import DecodeConfig, DraftConfig, ModelConfig, NgramConfig, default_dtype
from dspark_jax.engine import Engine
from dspark_jax.generation_defaults import read_defaults
from dspark_jax.memory import check_memory, free_memory
from dspark_jax.options import DRAFT_OPTIONS, LOOKUP_IGNORES, check_kinds, refuse_options
from dspark_jax.request import SamplingParams
from dspark_jax.scheduler import batch_tiers
from dspark_jax.sharding import DATA, TENSOR, adopt_mesh, check_divisible, make_mesh
from dspark_jax.text import open_tokenizer
from dspark_jax.verification import Verification
from pallas_kernels.platform import (
    decide_for,
    default_device,
    describe_device,
    implementation_for,
    resolve_implementation,
)

__all__ = ["EMBEDDED", "load", "ran_by"]

CPU_CHUNK, CHUNK = 64, 2048  # rows of one prefill call
NGRAM_DRAFTS = 7  # drafts of prompt lookup a round, unless a number is asked for
Report = Callable[[str], None]


def load(
    target: Place | None = None,
    draft: Place | Literal[False] | None = None,
    *,
    dtype: Dtype | None = None,
    max_length: int = 4096,
    max_batch: int = 8,
    confidence_threshold: float = 0.0,
    verification: Literal["fixed", "threshold", "scheduled"] | None = None,
    calibration: Place | None = None,
    costs: Place | None = None,
    rejection: Literal["token", "block", "gumbel"] = "token",
    draft_sampling: Literal["probabilistic", "greedy"] = "probabilistic",
    draft_top_k: int = 0,
    draft_truncation: bool = False,
    num_speculative_tokens: int | None = None,
    implementation: Literal["auto", "pallas", "xla"] = "auto",
    prefill_chunk: int | None = None,
    use_generation_config: bool = False,
    ceiling: bool = False,
    block_size: int | None = None,
    mask_token_id: int | None = None,
    sample_from_anchor: bool | None = None,
    target_layer_ids: Sequence[int] | None = None,
    tensor_parallel: int = 1,
    data_parallel: int = 1,
    mesh: Mesh | None = None,
    report: Report | None = None,
    progress: Progress | None = None,
) -> Engine:
    """Load a target and its draft, each a local folder or a hub repository id, into an engine.

    Without a target the embedded pair is loaded. A target without a draft is plain decoding; an
    Orbax store brings its own draft. `draft=False` leaves any draft out; `draft="ngram"` is prompt
    lookup, which drafts what followed an earlier occurrence of the last tokens.

    dtype: of weights, cache and activations; None is bfloat16 on a GPU or TPU, else float32
        (which implies the highest matmul precision).
    max_length: prompt and output together, in tokens; cut to the model's own limit.
    max_batch: rows decoded at once; memory for all of them is held ready.
    confidence_threshold: cut a proposal at the first draft of a lower confidence; 0 is off.
    verification: "fixed" verifies every draft, "threshold" cuts by confidence_threshold,
        "scheduled" verifies the drafts of the batch that are worth their cost (DSpark paper,
        Algorithm 1); None is one of the first two. Scheduled needs a confidence head and costs:
        `Engine.profile_costs` measures them.
    calibration: a file of `python -m bench calibrate`: temperatures of the confidence head.
    costs: a file of `Engine.profile_costs`; None is the one that it wrote for this pair here.
    rejection, draft_sampling, draft_top_k, draft_truncation: how drafts are drawn and judged.
    num_speculative_tokens: drafts a round; None is all that the block was trained for.
    implementation: of the kernels; "pallas" is refused where they cannot run.
    prefill_chunk: prompt rows of one call; None is 64 on a CPU and 2048 elsewhere.
    ceiling: report, in `Result.possible_acceptance`, what the laws of draft and target allow at
        each drafted position; costs the laws even where every row is greedy.
    use_generation_config: take sampling defaults from the checkpoint's generation_config.json.
    block_size, mask_token_id, sample_from_anchor, target_layer_ids: settle what the draft's file
        cannot, or has wrong.
    tensor_parallel, data_parallel: devices that split heads, MLP width and vocabulary, and slots.
    mesh: these devices as a mesh of the caller's, with the axes "tensor" and "data".
    report: called with lines for a reader; the first names device, dtype, implementation and
        memory. progress: called with (bytes loaded, bytes in all).

    Raises ValueError (CheckpointError, DeviceMemoryError among them) with one sentence that names
    what is wrong, before any weight is read wherever it can be told from the configuration.
    """
    check_kinds(locals())
    place = _mesh(mesh, tensor_parallel, data_parallel)
    device = place.local_devices[0] if place else default_device()
    on_cpu = device.platform == "cpu"
    resolve_implementation(implementation, device)  # a kernel that cannot run is an error now
    taps = None if target_layer_ids is None else tuple(target_layer_ids)
    overrides = DraftOverrides(block_size, mask_token_id, sample_from_anchor, taps)
    checkpoint = open_checkpoint(target, draft, overrides)
    decode = DecodeConfig(
        max_length=min(max_length, checkpoint.target.max_length),
        prefill_chunk=(CPU_CHUNK if on_cpu else CHUNK) if prefill_chunk is None else prefill_chunk,
        num_drafts=_num_drafts(checkpoint.draft, num_speculative_tokens),
        confidence_threshold=confidence_threshold,
        rejection=rejection,
        draft_sampling=draft_sampling,
        draft_top_k=draft_top_k,
        draft_truncation=draft_truncation,
        implementation=implementation,
        ceiling=ceiling,
    )
    if checkpoint.draft is None:
        refuse_options(decode, DRAFT_OPTIONS, "there is no draft")
    if isinstance(checkpoint.draft, NgramConfig):
        refuse_options(decode, LOOKUP_IGNORES, "it does nothing for prompt lookup")
    kind = default_dtype(device.platform) if dtype is None else dtype
    if implementation == "pallas" and kind != "bfloat16":
        raise ValueError("implementation 'pallas' takes bfloat16; leave it at 'auto', or dtype out")
    config = ModelConfig(checkpoint.target, _borrowing(checkpoint.draft), decode, kind)
    asked = Verification(verification, calibration, costs)
    asked.check(config, place)
    options = Options(max_length, max_batch, use_generation_config, place, asked)
    with decide_for(device):
        return _build(checkpoint, config, options, report, progress)


@dataclass(frozen=True)
class Options:
    """What loading itself needs of the options of `load`."""

    asked_length: int
    max_batch: int
    use_generation_config: bool
    mesh: Mesh | None
    verification: Verification


def _mesh(mesh: Mesh | None, tensor: int, data: int) -> Mesh | None:
    if mesh is None:
        return make_mesh(tensor, data)
    if (tensor, data) != (1, 1):
        raise ValueError("mesh brings its own sizes; leave tensor_parallel and data_parallel out")
    return adopt_mesh(mesh)


def _build(
    checkpoint: Checkpoint,
    config: ModelConfig,
    options: Options,
    report: Report | None,
    progress: Progress | None,
) -> Engine:
    """Hold the least memory it can take against the device, then read what is large."""
    tell = report or (lambda line: None)
    warn = (lambda line: report(f"warning: {line}")) if report else warnings.warn
    device, mesh, max_batch = default_device(), options.mesh, options.max_batch
    if mesh:
        check_divisible(config, max_batch, mesh)
    plan = check_memory(config, max_batch, free_memory(device), mesh)
    if checkpoint.share:
        checkpoint = checkpoint.share()
        config = replace(config, draft=checkpoint.draft)
        plan = check_memory(config, max_batch, free_memory(device), mesh)
    folder = checkpoint.store
    config = options.verification.settle(config, batch_tiers(max_batch), folder, mesh, tell)
    decode = config.decode
    memory = f"memory of each {plan}" if mesh else f"memory {plan}"
    tell(f"{_devices(device, mesh)}, {config.dtype}, {ran_by(config)}, {memory}")
    for warning in checkpoint.warnings:
        warn(warning)
    if options.asked_length > decode.max_length:
        tell(f"note: max_length is cut to the model's own limit, {decode.max_length}")
    defaults = _sampling_defaults(checkpoint.folder, options.use_generation_config, tell)
    tokenizer = open_tokenizer(checkpoint.folder)
    if tokenizer is None:
        tell(f"note: {checkpoint.folder} has no tokenizer: prompts must be token ids")
    return Engine(
        config,
        checkpoint.read(config.dtype, progress, mesh),
        tokenizer,
        checkpoint.stop_ids or (tokenizer.stop_ids if tokenizer else ()),
        max_batch=max_batch,
        defaults=defaults,
        report=warn,
        mesh=mesh,
        folder=folder,
    )


def _devices(device: Any, mesh: Mesh | None) -> str:
    name = describe_device(device)
    if mesh is None:
        return name
    return f"{mesh.size} x {name} as tensor {mesh.shape[TENSOR]} x data {mesh.shape[DATA]}"


def ran_by(config: ModelConfig) -> str:
    """What runs attention and cache writes of a decode step: "pallas" or "xla"."""
    return implementation_for(config.dtype, config.decode.implementation)


def _borrowing(draft: DraftConfig | NgramConfig | None) -> DraftConfig | NgramConfig | None:
    """The draft as it is where its embedding and head turn out to be the target's."""
    if not isinstance(draft, DraftConfig):
        return draft
    return replace(draft, own_embedding=False, own_head=draft.reduced_vocabulary)


def _num_drafts(draft: DraftConfig | NgramConfig | None, asked: int | None) -> int:
    """Drafts a round: the number asked for, or all that the draft was trained for."""
    name = "num_speculative_tokens"
    if draft is None:
        if asked is not None:
            raise ValueError(f"{name} is set, but there is no draft; leave it out")
        return 0
    if isinstance(draft, NgramConfig):
        if asked is not None and asked < 1:
            raise ValueError(f"{name} must be at least 1 for prompt lookup, got {asked}")
        return NGRAM_DRAFTS if asked is None else asked
    if asked is not None and not 1 <= asked <= draft.max_drafts:
        raise ValueError(
            f"{name} {asked} is not within 1 and the trained block's {draft.max_drafts}"
        )
    return draft.max_drafts if asked is None else asked


def _sampling_defaults(folder: Path, wanted: bool, tell: Report) -> SamplingParams:
    """The checkpoint's sampling settings where wanted; a note says what is or is not taken."""
    found = read_defaults(folder)
    if not found:
        return SamplingParams()
    shown = ", ".join(f"{name} {value}" for name, value in found.items())
    if wanted:
        unknown = [name for name in found if name not in SamplingParams.__dataclass_fields__]
        if unknown:
            raise ValueError(f"generation_config.json sets {unknown[0]}, which is not supported")
        try:
            defaults = SamplingParams(**found)
        except ValueError as error:
            raise ValueError(f"{folder / 'generation_config.json'}: {error}") from None
        tell(f"note: sampling defaults of generation_config.json are used: {shown}")
        return defaults
    tell(
        f"note: generation_config.json asks for {shown}, which is not used unless"
        " use_generation_config (--use-generation-config) says so"
    )
    return SamplingParams()

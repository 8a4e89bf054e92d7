"""Modes of verification as `load` settles them: fixed, by a threshold, or scheduled by costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from jax.sharding import Mesh

from dspark_jax.calibration import read_calibration
from dspark_jax.config import ModelConfig
from dspark_jax.costs import check_schedulable, find_costs, measuring, read_costs
from dspark_jax.tiers import BatchCosts, costs_between, modelled_costs
from pallas_kernels.platform import default_device

Mode = Literal["fixed", "threshold", "scheduled"]


@dataclass(frozen=True)
class Verification:
    """What was asked of `load`: a mode (None: by the threshold), and files for it."""

    mode: Mode | None = None
    calibration: str | Path | None = None
    costs: str | Path | None = None

    def check(self, config: ModelConfig, mesh: Mesh | None) -> None:
        """Raise ValueError for what does not go together; reads no file."""
        mode, threshold = self.mode, config.decode.confidence_threshold
        if mode is not None and mode not in get_args(Mode):
            raise ValueError(f"verification must be one of {get_args(Mode)}, got {mode!r}")
        if mode == "threshold" and not threshold:
            raise ValueError("verification 'threshold' needs a confidence_threshold above 0")
        if mode in ("fixed", "scheduled") and threshold:
            raise ValueError(
                f"verification {mode!r} does not go with confidence_threshold; leave one out"
            )
        if self.costs is not None and mode != "scheduled":
            raise ValueError("costs are for verification 'scheduled'; leave them out")
        if self.calibration is not None and mode != "scheduled" and not threshold:
            raise ValueError(
                "calibration does nothing where all drafts are verified; leave it out, or set"
                " verification 'scheduled' or a confidence_threshold"
            )
        if mode == "scheduled":
            check_schedulable(config, mesh)

    def settle(
        self,
        config: ModelConfig,
        batches: Iterable[int],
        folder: Path | None,
        mesh: Mesh | None,
        tell: Callable[[str], None],
    ) -> ModelConfig:
        """The configuration with its temperatures and costs, read from their files."""
        decode = config.decode
        if self.calibration is not None:
            decode = replace(decode, temperatures=read_calibration(self.calibration, config))
        if self.mode == "scheduled":
            decode = replace(decode, costs=self._costs(config, batches, folder, mesh, tell))
        return replace(config, decode=decode)

    def _costs(
        self,
        config: ModelConfig,
        batches: Iterable[int],
        folder: Path | None,
        mesh: Mesh | None,
        tell: Callable[[str], None],
    ) -> tuple[BatchCosts, ...]:
        path = find_costs(config, folder, mesh) if self.costs is None else self.costs
        device, batches = default_device(), tuple(batches)
        most = max(batches)
        table = () if path is None else read_costs(path, config, mesh, most)
        measured = max((one.batch for one in table), default=0)
        if self.costs is None and device.platform == "cpu" and measured < most:
            rows = f"of {most} rows" if measured else "of rounds"
            tell(f"note: no costs {rows} were measured here, so a model of them is used")
            step_rows = config.decode.step_rows
            return tuple(modelled_costs(batch, step_rows).pruned() for batch in batches)
        if path is None:
            raise ValueError(
                f"verification 'scheduled' needs the costs of rounds on {device.device_kind}, and"
                " none were measured for this pair and its settings; measure them once with"
                f" {measuring(config, mesh, most)} of an engine loaded without it"
            )
        try:
            return tuple(
                costs_between(table, batch, sampled).pruned()
                for batch in batches
                for sampled in (False, True)
            )
        except ValueError as error:  # with each batch that is needed: files are not always joined
            remedy = f"measure again with {measuring(config, mesh, most)}"
            raise ValueError(f"{path}: {error}; {remedy}") from None

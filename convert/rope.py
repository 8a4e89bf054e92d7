"""Rotary-embedding settings as transformers 4 and 5 write them -> RopeConfig."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from convert.settings import (
    FLAG,
    LENGTH,
    NONNEGATIVE,
    POSITIVE,
    SECTION,
    ConfigReading,
    Kind,
    brief,
)
from dspark_jax.config import RopeConfig

ORIGINAL = "original_max_position_embeddings"
KNOWN = {
    "default": (),
    "linear": ("factor",),
    "yarn": (
        "factor",
        ORIGINAL,
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "llama3": ("factor", ORIGINAL, "low_freq_factor", "high_freq_factor"),
}
ALWAYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "attention_factor")


def read_rope(reading: ConfigReading) -> RopeConfig | None:
    """Resolve the rotary embedding of the decoder-layer section; None after a problem.

    `rope_parameters` (transformers 5) comes before `rope_scaling` with a flat `rope_theta`
    (transformers 4). The yarn attention factor follows `modeling_rope_utils` of transformers.
    """
    before = len(reading.problems)
    rope = _Rope(reading, *_flat_object(reading))
    kind, theta = rope.kind(), rope.theta()
    if len(reading.problems) > before:
        return None
    rope.refuse_unknown(kind)
    made = rope.build(kind, theta)
    return made if len(reading.problems) == before else None


def _flat_object(reading: ConfigReading) -> tuple[dict[str, Any], str]:
    """Return the rope object and its path; objects by layer type must agree to be one."""
    paths = [reading.path(name) for name in ("rope_parameters", "rope_scaling")]
    if len({str(value) for _, value in reading.present(*paths)}) > 1:
        reading.problem(f"{paths[0]} and {paths[1]} are both there and differ: remove one")
    for path in paths:
        if reading.lookup(path) is None:
            continue
        values = reading.find("rope", SECTION, path) or {}
        nested = [v for v in values.values() if isinstance(v, dict)]
        if nested and (len(nested) < len(values) or any(v != nested[0] for v in nested)):
            reading.problem(f"{path} differ between layer types, which is not supported")
        return dict(nested[0] if nested else values), path
    return {}, ""


@dataclass
class _Rope:
    reading: ConfigReading
    values: dict[str, Any]
    where: str  # path of the object, empty where there is none

    def kind(self) -> str:
        words = [self.values[k] for k in ("rope_type", "type") if self.values.get(k) is not None]
        kind = words[0] if words else "default"
        if any(word != kind for word in words) or not isinstance(kind, str) or kind not in KNOWN:
            found = " and ".join(map(str, words))
            self.reading.problem(
                f"rope type {found} is not supported (supported: {', '.join(KNOWN)})"
            )
            return "default"
        origin = f"{self.reading.file}: {self.where}" if self.where else "default"
        self.reading.record("rope", kind, origin)
        return kind

    def theta(self) -> float:
        reading = self.reading
        before = len(reading.problems)
        theta = self.pick("rope_theta", POSITIVE)
        if theta is not None:
            self.hold_flat_theta(theta)
            reading.record("rope_theta", theta, f"{reading.file}: {self.where}.rope_theta")
        else:
            theta = reading.layer("rope_theta", POSITIVE)
        if theta is None and len(reading.problems) == before:
            reading.problem("rope_theta is missing, flat and in rope_parameters: add it")
        return float(theta or 1.0)

    def hold_flat_theta(self, theta: float) -> None:
        path = self.reading.path("rope_theta")
        flat = self.reading.lookup(path)
        if flat is not None and (type(flat) not in (int, float) or flat != theta):
            self.reading.problem(
                f"{path} is {brief(flat)}, but {self.where}.rope_theta is {theta}: remove the"
                " wrong one"
            )

    def pick(self, name: str, kind: Kind) -> Any:
        value = self.values.get(name)
        if value is not None and not kind.holds(value):
            self.reading.problem(f"{self.where}.{name} must be {kind.words}, got {brief(value)}")
            return None
        return value

    def refuse_unknown(self, kind: str) -> None:
        partial = self.values.get("partial_rotary_factor")
        if partial not in (None, 1):
            self.reading.problem(
                f"{self.where}.partial_rotary_factor is {partial!r}: partial rotary layers are"
                " not supported"
            )
        for name in sorted(set(self.values) - {*KNOWN[kind], *ALWAYS}):
            if self.values[name] not in (None, False):
                self.reading.problem(f"{self.where}.{name} is not understood for type {kind}")

    def original(self) -> int | None:
        """The trained length: beside the rope object, inside it, or the model's own limit."""
        beside = self.reading.layer(ORIGINAL, LENGTH)
        return beside or self.pick(ORIGINAL, LENGTH) or self.longest()

    def longest(self) -> int | None:
        return self.reading.layer("max_position_embeddings", LENGTH)

    def build(self, kind: str, theta: float) -> RopeConfig | None:
        if kind == "default":
            return RopeConfig(theta=theta)
        original = self.original() if kind != "linear" else 0
        factor = self.pick("factor", POSITIVE)
        if factor is None and kind == "yarn" and original:
            factor = (self.longest() or original) / original
        if factor is None or original is None:
            missing = ORIGINAL if original is None else "factor"
            self.reading.problem(f"rope type {kind} needs {missing}")
            return None
        if kind == "linear":
            return RopeConfig(kind="linear", theta=theta, factor=factor)
        if kind == "llama3":
            return self.llama3(theta, factor, original)
        return self.yarn(theta, factor, original)

    def llama3(self, theta: float, factor: float, original: int) -> RopeConfig | None:
        low, high = (self.pick(f"{end}_freq_factor", POSITIVE) for end in ("low", "high"))
        if low is None or high is None or low >= high:
            self.reading.problem(
                f"rope type llama3 needs low_freq_factor below high_freq_factor, got {low}, {high}"
            )
            return None
        return RopeConfig(
            kind="llama3",
            theta=theta,
            factor=factor,
            original_max_position=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )

    def yarn(self, theta: float, factor: float, original: int) -> RopeConfig:
        truncate = self.pick("truncate", FLAG)
        return RopeConfig(
            kind="yarn",
            theta=theta,
            factor=factor,
            original_max_position=original,
            attention_factor=self.yarn_attention(factor),
            beta_fast=self.pick("beta_fast", NONNEGATIVE) or 32.0,
            beta_slow=self.pick("beta_slow", NONNEGATIVE) or 1.0,
            truncate=truncate is True or "truncate" not in self.values,
        )

    def yarn_attention(self, factor: float) -> float:
        """The factor on cos and sin: given, from both mscales, or 0.1 ln(factor) + 1."""

        def scale(weight: float) -> float:
            return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

        given = self.pick("attention_factor", POSITIVE)
        mscale = self.pick("mscale", NONNEGATIVE)
        mscale_all = self.pick("mscale_all_dim", NONNEGATIVE)
        if given is not None:
            return float(given)
        if mscale and mscale_all:
            return scale(mscale) / scale(mscale_all)
        return scale(1.0)

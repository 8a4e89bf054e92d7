"""Typed look-ups in a config.json that remember which key each value came from."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, NamedTuple

MAX_NUMBER = 1e30  # above every constant in use, below what overflows float32
LARGEST = 1 << 24  # above every size in use; keeps a hostile number from taking memory


class Kind(NamedTuple):
    """What a value must be, in words and as a test."""

    words: str
    holds: Callable[[Any], bool]


def _whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)  # overrides may be numpy's


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < MAX_NUMBER  # NaN compares false


SIZE = Kind(
    f"a positive whole number of at most {LARGEST}", lambda v: _whole(v) and 0 < v <= LARGEST
)
COUNT = Kind(f"a whole number from 0 to {LARGEST}", lambda v: _whole(v) and 0 <= v <= LARGEST)
LENGTH = Kind("a positive whole number below 2**31", lambda v: _whole(v) and 0 < v < 1 << 31)
DEPTH = Kind("a whole number from 1 to 1024", lambda v: _whole(v) and 0 < v <= 1024)
FLAG = Kind("true or false", lambda v: type(v) is bool)
POSITIVE = Kind("a positive number", lambda v: _number(v) and v > 0)
NONNEGATIVE = Kind("a number of at least 0", lambda v: _number(v) and v >= 0)
WORD = Kind("a word", lambda v: isinstance(v, str))
WORDS = Kind("a list of words", lambda v: _listed(v, lambda e: isinstance(e, str)))
LAYER_IDS = Kind("a list of layer numbers", lambda v: bool(v) and _listed(v, _whole))
SECTION = Kind("an object", lambda v: isinstance(v, dict))


def _listed(value: Any, holds: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and len(value) <= 1024 and all(map(holds, value))


class Setting(NamedTuple):
    """One resolved value and where it was found."""

    value: Any
    origin: str


@dataclass
class ConfigReading:
    """A parsed config.json, what was read from it, and what was wrong with it.

    `defaults` stand in for absent keys of `section` (a file that holds only the differences from
    its class). A null counts as absent. `consulted` holds every path that was looked at.
    """

    tree: dict[str, Any]
    problems: list[str]
    file: str = "config.json"
    section: str = ""
    defaults: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Setting] = field(default_factory=dict)
    consulted: set[str] = field(default_factory=set)

    def lookup(self, path: str) -> Any:
        """Return the value at a dotted path from the root, None where absent."""
        self.consulted.add(path)
        value: Any = self.tree
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def present(self, *paths: str) -> list[tuple[str, Any]]:
        """Return (path, value) for those of the paths that hold something."""
        return [(path, value) for path in paths if (value := self.lookup(path)) is not None]

    def find(self, name: str, kind: Kind, *paths: str) -> Any:
        """Return the value under the first path that holds one, None where none does.

        Paths that disagree, and a value of another kind, are problems (None comes back).
        """
        hits = self.present(*(paths or (name,)))
        if not hits:
            return None
        path, value = hits[0]
        for other, second in hits[1:]:
            if second != value or type(second) is not type(value):
                self.problem(f"{path} is {brief(value)}, but {other} is {brief(second)}")
                return None
        if not kind.holds(value):
            self.problem(f"{path} must be {kind.words}, got {brief(value)}")
            return None
        return self.record(name, value, f"{self.file}: {path}")

    def path(self, name: str) -> str:
        """Return the path of a key of the decoder-layer section."""
        return f"{self.section}.{name}" if self.section else name

    def layer(self, name: str, kind: Kind, absent: Any = None) -> Any:
        """Return a key of the decoder-layer section; else its class default; else `absent`."""
        path = self.path(name)
        if self.lookup(path) is not None:
            return self.find(name, kind, path)
        if self.defaults.get(name) is not None:
            return self.record(name, self.defaults[name], "class default")
        return absent if absent is None else self.record(name, absent, "default")

    def require(self, name: str, kind: Kind) -> Any:
        """As `layer`, but an absent key is a problem."""
        before = len(self.problems)
        value = self.layer(name, kind)
        if value is None and len(self.problems) == before:
            self.problem(f"{self.path(name)} is missing; it must be {kind.words}")
        return value

    def record(self, name: str, value: Any, origin: str) -> Any:
        """Remember a resolved value and return it."""
        self.settings[name] = Setting(value, origin)
        return value

    def problem(self, message: str) -> None:
        self.problems.append(f"{self.file}: {message}")


def brief(value: Any) -> str:
    """Return a value in words short enough for a sentence."""
    text = repr(value)
    if isinstance(value, float) and not math.isfinite(value):
        return f"{text}, which is not a finite number"
    return text if len(text) <= 60 else text[:57] + "..."

"""Draft packagings: which one a file is in, and how its keys are looked up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from convert.decoder import MODEL_TYPES
from convert.settings import FLAG, WORD, ConfigReading, Kind, brief

NESTED = ("dflash_config", "dspark_config")
DRAFT_MODEL_TYPES = ("dflash", "dspark", "qwen3_dflash", "qwen3_dspark")  # Qwen3 layers inside
NATIVE_NAMES = ("context_proj.weight", "context_norm.weight", "final_norm.weight")
W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"

Name = Literal["deepspec", "torchspec", "speculators", "specforge", "z-lab"]


class Packaging(NamedTuple):
    """The packaging of a draft and the mark it was recognised by."""

    name: Name
    why: str


@dataclass(frozen=True)
class DraftOverrides:
    """What the user knows better than the file; None leaves it to the file."""

    block_size: int | None = None
    mask_token_id: int | None = None
    sample_from_anchor: bool | None = None
    target_layer_ids: tuple[int, ...] | None = None


@dataclass
class DraftReading:
    """A draft's config.json with its tensor shapes by canonical name; collects warnings."""

    config: ConfigReading
    shapes: dict[str, tuple[int, ...]]
    packaging: Packaging
    overrides: DraftOverrides
    warnings: list[str] = field(default_factory=list)
    weights: str = "the weights"  # where the tensors are, in words

    def tensor_problem(self, name: str, message: str) -> None:
        self.problems.append(f"{name} in {self.weights}: {message}")

    @property
    def problems(self) -> list[str]:
        return self.config.problems

    def own_tied_head(self) -> bool:
        """Whether the draft's head is its own stored embedding; if so the shapes name it too."""
        tied = self.config.find("tie_word_embeddings", FLAG)
        embedding = self.shapes.get("embed_tokens.weight")
        if not tied or embedding is None or "lm_head.weight" in self.shapes:
            return False
        self.shapes["lm_head.weight"] = embedding
        return True

    def anywhere(self, name: str, kind: Kind, *more: str) -> Any:
        """Look at the root, then in `dflash_config`, `dspark_config` and the `more` paths."""
        return self.config.find(name, kind, name, *(f"{n}.{name}" for n in NESTED), *more)

    def overridden(self, name: str, kind: Kind, found: Any) -> Any:
        """Return the user's value where there is one, with a warning where the file differs.

        A value of another kind is a problem, as it is in a file (None comes back).
        """
        asked = getattr(self.overrides, name)
        if asked is None:
            return found
        if not kind.holds(asked):
            self.problems.append(f"the override {name} must be {kind.words}, got {brief(asked)}")
            return None
        if found is not None and found != asked:
            self.warnings.append(f"{name}: the file says {found}, overridden with {asked}")
        return self.config.record(name, asked, "override")


def identify(tree: dict[str, Any], raw_names: Iterable[str], markov: bool) -> Packaging | None:
    """Return the packaging of a draft, None where nothing is recognised.

    The architecture alone does not tell: two packagings share each of its spellings.
    """
    named, names = architectures(tree), set(raw_names)
    for key in ("speculators_model_type", "speculators_config", "transformer_layer_config"):
        if key in tree:
            return Packaging("speculators", f"config.json: {key}")
    if "target_num_hidden_layers" in tree:
        return Packaging("torchspec", "config.json: target_num_hidden_layers")
    native = next((name for name in NATIVE_NAMES if name in names), None)
    if native:
        return Packaging("torchspec", f"tensor {native}")
    if "Qwen3DSparkModel" in named:
        return Packaging("deepspec", "architecture Qwen3DSparkModel")
    prefixed = next((n for n in sorted(names) if n.startswith("logit_head.")), None)
    nested = tree.get("dflash_config")
    projector = nested.get("projector_type") if isinstance(nested, dict) else None
    if projector == "dspark" or prefixed or "DSparkDraftModel" in named:
        mark = "dflash_config.projector_type" if projector else prefixed or "DSparkDraftModel"
        return Packaging("specforge", f"{mark} without a speculators key")
    if "DFlashDraftModel" in named:
        name: Name = "specforge" if markov else "z-lab"
        heads = "with" if markov else "without"
        return Packaging(name, f"architecture DFlashDraftModel {heads} a Markov head")
    return None


def architectures(tree: dict[str, Any]) -> list[str]:
    """Return the architecture names of a config.json, without what is not a name."""
    listed = tree.get("architectures")
    return [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []


def decoder_type(reading: ConfigReading) -> str:
    """Return the model type of the draft's decoder layers; Qwen3 unless the file names another."""
    found = reading.layer("model_type", WORD, "qwen3")
    if found in MODEL_TYPES:
        return str(found)
    if found not in DRAFT_MODEL_TYPES:
        reading.problem(f"{reading.path('model_type')} {found} is not supported for draft layers")
    return "qwen3"

"""Refuse a stranger's module in the place of one of our packages, without running it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


class ShadowedPackageError(ImportError):
    """A file earlier on the module path has the name of one of our packages."""


def refuse_shadows(*names: str) -> None:
    """Raise ShadowedPackageError unless each package name resolves to the one beside dspark_jax.

    `convert` and `bench` are common names: `python -m` and scripts put their own folder first.
    """
    home = Path(__file__).resolve().parent.parent
    for name in names:
        spec = find_spec(name)  # looks a top-level name up and executes nothing
        if spec is None:
            raise ShadowedPackageError(f"the package {name} of dspark-jax is missing: reinstall it")
        found = Path(spec.origin or next(iter(spec.submodule_search_locations or ())))
        if found.resolve() != home / name / "__init__.py":
            raise ShadowedPackageError(
                f"{found} has the name of the package {name} of dspark-jax and hides it; rename"
                " it or run from another folder"
            )

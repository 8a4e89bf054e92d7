"""The installed commands whose packages have common names, each behind a check of that name."""

from __future__ import annotations

import sys
from importlib import import_module

from dspark_jax.shadow import ShadowedPackageError, refuse_shadows


def convert() -> int:
    """dspark-convert: the same as `python -m convert`."""
    return _run("convert")


def bench() -> int:
    """dspark-bench: the same as `python -m bench`."""
    return _run("bench")


def _run(package: str) -> int:
    try:
        refuse_shadows(package)
    except ShadowedPackageError as error:
        print(f"dspark-{package}: {error}", file=sys.stderr)
        return 2
    return import_module(f"{package}.__main__").main()

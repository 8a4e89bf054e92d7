"""Command-line flags that settle what a draft's file cannot, for every command that loads one."""

from __future__ import annotations

import argparse
from typing import NoReturn

from convert.dialects import DraftOverrides


class Parser(argparse.ArgumentParser):
    """A parser that ends a wrong command line with one sentence instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


def add_override_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that settle what a draft file cannot; `overrides_of` reads them."""
    group = parser.add_argument_group("overrides, where the draft's file is wrong or silent")
    group.add_argument("--block-size", type=positive, help="rows of the trained block")
    group.add_argument("--mask-token-id", type=int, help="id that fills the block")
    group.add_argument(
        "--sample-from-anchor",
        action=argparse.BooleanOptionalAction,
        help="whether the anchor's row is sampled too (else 1 + N layout)",
    )
    group.add_argument(
        "--target-layer-ids", type=_layer_ids, metavar="I,J,...", help="tapped target layers"
    )


def overrides_of(arguments: argparse.Namespace) -> DraftOverrides:
    """Return the overrides that were given on a command line."""
    return DraftOverrides(
        block_size=arguments.block_size,
        mask_token_id=arguments.mask_token_id,
        sample_from_anchor=arguments.sample_from_anchor,
        target_layer_ids=arguments.target_layer_ids,
    )


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _layer_ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers with commas, got {text}") from None

"""`python -m convert`: check a target and a draft, write them as a store, or export them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from convert.apply import Params, Progress, load_draft_params, load_target_params
from convert.dialects import DraftOverrides
from convert.doctor import Report, as_json, as_text, examine, stored_dtype
from convert.flags import Parser, add_override_flags, overrides_of, positive
from convert.hub import resolve_folder
from convert.packaging import (
    DraftSource,
    TargetSource,
    read_draft,
    read_target,
    share_with_target,
)
from convert.problems import CheckpointError
from convert.store import place_in_parts, save, split_host
from convert.tokens import stop_token_ids
from dspark_jax.config import ModelConfig
from dspark_jax.decoding import DecodeConfig
from dspark_jax.exported import PLATFORMS, check_export
from dspark_jax.folders import check_unused

REFUSED = 2


def build_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="python -m convert",
        description="Check Hugging Face checkpoints of a target and its draft, convert them, or"
        " export them for every accelerator.",
        epilog="Exit code 0: the pair fits or was written; 2: refused, with the reason.",
    )
    parser.add_argument("--target", required=True, help="folder or hub id of the target")
    parser.add_argument("--draft", help="folder or hub id of the draft; without it a target alone")
    parser.add_argument(
        "--check", action="store_true", help="read everything and print what was found"
    )
    parser.add_argument("--json", action="store_true", help="with --check: one JSON object")
    parser.add_argument("--out", metavar="STORE", help="new folder for the Orbax store")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of what is written (default: bfloat16 if all weights are stored so, else float32)",
    )
    parser.add_argument(
        "--max-length",
        type=positive,
        default=4096,
        help="tokens the memory sum and exported programs are for (4096)",
    )
    parser.add_argument(
        "--export-stablehlo",
        metavar="DIR",
        help="new folder for programs and weights that `load_exported` runs",
    )
    parser.add_argument(
        "--platforms",
        help=f"of the export, none of which need be here ({','.join(PLATFORMS)})",
    )
    parser.add_argument("--batch", type=positive, help="slots of the export (1)")
    add_override_flags(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code. Without `argv` the process is the command's own."""
    if argv is None:
        split_host()
    parser = build_parser()
    arguments = parser.parse_args(argv)
    overrides = overrides_of(arguments)
    _check_flags(parser, arguments)
    if arguments.draft is None and overrides != DraftOverrides():
        parser.error("the overrides go with --draft")
    try:
        if arguments.out:
            check_unused(arguments.out, CheckpointError)
        if arguments.export_stablehlo:
            check_export(arguments.export_stablehlo, _platforms(arguments))
        if arguments.check and _check(arguments, overrides).problems:
            return REFUSED
        if arguments.out or arguments.export_stablehlo:
            with jax.default_device(jax.devices("cpu")[0]):  # host memory holds more
                _convert(arguments, overrides)
    except ValueError as error:  # CheckpointError and ExportError among them
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return 130
    return 0


def _check_flags(parser: Parser, arguments: argparse.Namespace) -> None:
    """End the process where flags do not go together."""
    for name in ("target", "draft"):
        if getattr(arguments, name) == "":
            parser.error(f"--{name} is empty: name a folder or a hub id")
    store, export = arguments.out, arguments.export_stablehlo
    if "" in (store, export):
        parser.error("--out or --export-stablehlo is empty: name a folder, or leave it out")
    if not arguments.check and not store and not export:
        parser.error("nothing to do: give --check, --out STORE, --export-stablehlo DIR, or several")
    if arguments.json and not arguments.check:
        parser.error("--json goes with --check")
    if not export and (arguments.platforms is not None or arguments.batch is not None):
        parser.error("--platforms and --batch go with --export-stablehlo")
    if store and export and Path(store).absolute() == Path(export).absolute():
        parser.error(f"--out and --export-stablehlo both name {store}: give each its own folder")


def _platforms(arguments: argparse.Namespace) -> list[str]:
    """What --platforms names; all of them without it."""
    if arguments.platforms is None:
        return list(PLATFORMS)
    return list(dict.fromkeys(name.strip() for name in arguments.platforms.split(",")))


def _check(arguments: argparse.Namespace, overrides: DraftOverrides) -> Report:
    with _Progress("checking") as progress:
        report = examine(
            arguments.target,
            arguments.draft,
            overrides,
            dtype=arguments.dtype,
            max_length=arguments.max_length,
            progress=progress,
        )
    print(as_json(report) if arguments.json else as_text(report))
    if report.problems:
        print(f"error: {CheckpointError(report.problems)}", file=sys.stderr)
    return report


def _convert(arguments: argparse.Namespace, overrides: DraftOverrides) -> None:
    target = read_target(resolve_folder(arguments.target))
    draft = None
    if arguments.draft is not None:
        draft = read_draft(resolve_folder(arguments.draft), target, overrides)
    decode = _decode_config(arguments, target, draft) if arguments.export_stablehlo else None
    if draft is not None:
        draft = share_with_target(draft, target)
    dtype = arguments.dtype or stored_dtype(target, draft)
    with _Progress("target") as progress:
        params = {"target": load_target_params(target, dtype, progress, place_in_parts)}
    warnings = [*target.warnings, *(draft.warnings if draft else ())]
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    origin = {"target": arguments.target, "draft": arguments.draft, "warnings": warnings}
    if draft is not None:
        with _Progress("draft") as progress:
            params["draft"] = load_draft_params(draft, dtype, progress, place_in_parts)
    if arguments.out:
        save(
            arguments.out,
            params,
            target.config,
            draft.config if draft else None,
            token_files=target.folder,
            origin=origin,
        )
        print(f"wrote {arguments.out} ({dtype})", file=sys.stderr)
    if decode is not None:
        config = ModelConfig(target.config, draft.config if draft else None, decode, dtype)
        _export(arguments, target.folder, config, params)
        print(f"wrote {arguments.export_stablehlo} ({dtype})", file=sys.stderr)


def _decode_config(
    arguments: argparse.Namespace, target: TargetSource, draft: DraftSource | None
) -> DecodeConfig:
    """What exported programs are for; ValueError for a length that none can have."""
    length = min(arguments.max_length, target.config.max_length)
    return DecodeConfig(max_length=length, num_drafts=draft.config.max_drafts if draft else 0)


def _export(
    arguments: argparse.Namespace, folder: Path, config: ModelConfig, params: Params
) -> None:
    """Write the pair as the programs and weights that `load_exported` runs.

    The tokenizer and stop ids are those of the target's `folder`.
    """
    from dspark_jax.exporting import export_pair  # a second of imports that only this needs

    export_pair(
        arguments.export_stablehlo,
        config,
        params,
        batch=arguments.batch or 1,
        platforms=_platforms(arguments),
        stop_ids=stop_token_ids(folder),
        token_files=folder,
    )


class _Progress:
    """A bar on standard error while weights are read; nothing where that is not a terminal."""

    def __init__(self, label: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task(label, total=None)

    def __enter__(self) -> Progress:
        self._bar.start()
        return lambda done, total: self._bar.update(self._task, completed=done, total=total)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


if __name__ == "__main__":
    sys.exit(main())

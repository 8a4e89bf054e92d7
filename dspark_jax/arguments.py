"""Flags of the command line: what they are, which go together, and the prompts they name."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark_jax.shadow import refuse_shadows
from dspark_jax.text import conversations, has_chat_template

DEFAULT_PROMPT = 'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n'
SAMPLING_FLAGS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
    "min_tokens",
    "logit_bias",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
LOAD_FLAGS = (
    "dtype",
    "max_length",
    "confidence_threshold",
    "verification",
    "calibration",
    "rejection",
    "draft_sampling",
    "draft_top_k",
    "draft_truncation",
    "num_speculative_tokens",
    "implementation",
    "use_generation_config",
    "block_size",
    "mask_token_id",
    "sample_from_anchor",
    "target_layer_ids",
    "tensor_parallel",
    "data_parallel",
)


def build_parser() -> argparse.ArgumentParser:
    """Flags and their defaults; None stands for the default of the thing that is configured."""
    refuse_shadows("convert")
    from convert.flags import Parser, add_override_flags

    parser = Parser(
        prog="dspark_jax.generate",
        description="Continue prompts with DSpark speculative decoding. Without arguments a prompt"
        " is completed on the embedded pair.",
        epilog="Defaults: --max-tokens 128 --temperature 0 --seed 0 --max-length 4096 (or the"
        " model's own limit, if smaller). Text goes to standard output, notes to standard error.",
        allow_abbrev=False,
    )
    add = parser.add_argument_group("models").add_argument
    add("--target", metavar="DIR", help="folder, converted store or hub id of the target")
    add("--draft", metavar="DIR", help="folder or hub id of the draft, or ngram")
    add("--no-draft", action="store_true", help="plain decoding, the baseline")
    add("--dtype", choices=("float32", "bfloat16"), help="default: by device")
    add("--max-length", type=int, default=4096, metavar="N", help="prompt and output (4096)")
    add("--implementation", choices=("auto", "pallas", "xla"), default="auto", help="of kernels")
    add("--tensor-parallel", type=int, default=1, metavar="N", help="devices that split it (1)")
    add("--data-parallel", type=int, default=1, metavar="N", help="devices that split prompts (1)")
    add = parser.add_argument_group("prompts").add_argument
    add("--prompt", action="append", default=[], metavar="TEXT", help="may be repeated")
    add(
        "--prompt-file",
        action="append",
        default=[],
        metavar="FILE",
        help="one prompt a line; - is standard input; may be repeated",
    )
    add("--chat", action="store_true", help="put prompts into the tokenizer's chat template")
    add("--messages", metavar="FILE", help="a JSON list of chat messages, or a list of such lists")
    add(
        "--enable-thinking",
        action="store_true",
        help="let the chat template ask for thinking (off: drafts are trained without it)",
    )
    add = parser.add_argument_group("sampling").add_argument
    add("--max-tokens", type=int, default=128, metavar="N", help="output tokens (128)")
    add("--temperature", type=float, metavar="T", help="below 1e-5 greedy (0)")
    add("--top-p", type=float, metavar="P", help="1 is off (1)")
    add("--top-k", type=int, metavar="K", help="0 is off (0)")
    add("--min-p", type=float, metavar="P", help="0 is off (0)")
    add("--seed", type=int, default=0, metavar="N", help="of the noise (0)")
    add("--stop", action="append", metavar="TEXT", help="end the text before it; repeatable")
    add(
        "--stop-token-id",
        action="append",
        type=int,
        dest="stop_token_ids",
        metavar="ID",
        help="one more stop token; repeatable",
    )
    add("--ignore-eos", action="store_true", help="go on past the model's stop tokens")
    add("--min-tokens", type=int, metavar="N", help="no stop token before (0)")
    add("--repetition-penalty", type=float, metavar="R", help="over prompt and output; 1 is off")
    add("--presence-penalty", type=float, metavar="P", help="over the output; 0 is off")
    add("--frequency-penalty", type=float, metavar="P", help="over the output; 0 is off")
    add(
        "--logit-bias",
        action="append",
        type=bias_entry,
        metavar="ID=X",
        help="add X to a token's logit; repeatable",
    )
    add("--logprobs", type=int, metavar="N", help="report them with the N likeliest (--json)")
    add("--use-generation-config", action="store_true", help="the checkpoint's sampling defaults")
    add = parser.add_argument_group("drafting").add_argument
    add("--confidence-threshold", type=float, default=0.0, metavar="C", help="cut below it (0)")
    add("--verification", choices=("fixed", "threshold", "scheduled"), help="of drafts (fixed)")
    add("--calibration", metavar="FILE", help="of bench calibrate, for the confidence head")
    add("--num-speculative-tokens", type=int, metavar="N", help="drafts a round (the block's)")
    add("--rejection", choices=("token", "block", "gumbel"), default="token")
    add("--draft-sampling", choices=("probabilistic", "greedy"), default="probabilistic")
    add("--draft-top-k", type=int, default=0, metavar="K", help="candidates a position; 0 is all")
    add("--draft-truncation", action="store_true", help="cut the draft's law as the target's")
    add_override_flags(parser)
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="JSON Lines, one object a prompt")
    add("--show-drafts", action="store_true", help="colour accepted, corrected and bonus tokens")
    return parser


def bias_entry(text: str) -> tuple[int, float]:
    """Parse ID=X as a pair."""
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be ID=X, a token id and a number, got {text!r}"
        ) from None


def check_arguments(arguments: argparse.Namespace) -> None:
    """Refuse flags that do not go together."""
    target, draft = arguments.target, arguments.draft
    for name in ("target", "draft"):
        if getattr(arguments, name) == "":
            raise ValueError(f"--{name} is empty; name a folder or a hub id, or leave it out")
    if draft and not target and draft != "ngram":
        raise ValueError(f"--draft {draft} has no target; add --target")
    if draft and arguments.no_draft:
        raise ValueError("--draft and --no-draft exclude each other; leave one out")
    if target and not draft and not arguments.no_draft and not _is_store(target):
        raise ValueError(f"--target {target} needs --draft DIR, or --no-draft for plain decoding")
    if arguments.json and arguments.show_drafts:
        raise ValueError("--json and --show-drafts exclude each other; leave one out")
    if arguments.messages is not None and (arguments.prompt or arguments.prompt_file):
        raise ValueError("--messages brings its own prompts; leave --prompt and --prompt-file out")
    if arguments.logprobs is not None and not arguments.json:
        raise ValueError("--logprobs is written by --json only; add it or leave both out")
    arguments.chat = arguments.chat or arguments.messages is not None
    if arguments.enable_thinking and not arguments.chat:
        raise ValueError("--enable-thinking does nothing without --chat; add it or leave both out")
    if arguments.chat:
        _check_template("--chat" if arguments.messages is None else "--messages", target)


def _check_template(flag: str, target: str | None) -> None:
    """Refuse a chat before weights are read, where the target is on this machine."""
    folder = Path(target) if target else Path(__file__).parent / "demo" / "target"
    if folder.is_dir() and not has_chat_template(folder):
        name = target or "the embedded pair"
        raise ValueError(f"{flag}: the tokenizer of {name} has no chat template; leave it out")


def _is_store(target: str) -> bool:
    from convert.store import is_store

    return is_store(target)


def sampling_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The flags of SamplingParams that were given or have a default of their own."""
    named = {name: getattr(arguments, name) for name in SAMPLING_FLAGS}
    return {name: value for name, value in named.items() if value is not None}


def read_prompts(arguments: argparse.Namespace) -> list[str]:
    """The prompts of --prompt, then the lines of each --prompt-file; else the default prompt."""
    prompts = list(arguments.prompt)
    for name in arguments.prompt_file:
        lines = [line for line in _read("--prompt-file", name).split("\n") if line.strip()]
        if not lines:
            raise ValueError(f"--prompt-file {name} holds no prompt; write one a line")
        prompts += lines
    return prompts or [DEFAULT_PROMPT]


def read_messages(name: str | None) -> list[Sequence[Mapping[str, Any]]]:
    """The conversations of --messages; none without the flag."""
    if name is None:
        return []
    text = _read("--messages", name)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--messages {name} is not JSON: {error}") from None
    if found == []:
        raise ValueError(f"--messages {name} holds no message; write at least one")
    return conversations(f"--messages {name}", found)


def _read(flag: str, name: str) -> str:
    """The text of a file that a flag names, without a byte order mark; - is standard input."""
    try:
        if flag == "--prompt-file" and name == "-":
            return sys.stdin.read().removeprefix("\ufeff")
        return Path(name).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag} {name} is not UTF-8: {error}") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{flag} {name} cannot be read: {reason}") from None

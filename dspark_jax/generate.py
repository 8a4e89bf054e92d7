"""The command line: continue prompts, stream the text. Imports nothing heavy before it has to."""

from __future__ import annotations

import argparse
import logging
import os
import re
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dspark_jax.request import SamplingParams
from dspark_jax.shadow import refuse_shadows

if TYPE_CHECKING:
    from dspark_jax.engine import Engine
    from dspark_jax.scheduler import Request

DEFAULT_PROMPT = 'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n'
CACHE = Path("~/.cache/dspark_jax")
MOST_ROWS = 8  # prompts decoded at once
CUDA13_DRIVER = 580  # the first driver that runs CUDA 13
SAMPLING_FLAGS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "ignore_eos",
)
LOAD_FLAGS = (
    "dtype",
    "max_length",
    "confidence_threshold",
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
)


class Parser(argparse.ArgumentParser):
    """One sentence on standard error instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


def build_parser() -> Parser:
    """Flags and their defaults; None stands for the default of the thing that is configured."""
    refuse_shadows("convert")
    from convert.flags import add_override_flags

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
    add = parser.add_argument_group("prompts").add_argument
    add("--prompt", action="append", default=[], metavar="TEXT", help="may be repeated")
    add("--prompt-file", metavar="FILE", help="one prompt a line; - is standard input")
    add("--chat", action="store_true", help="put prompts into the tokenizer's chat template")
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
    add("--ignore-eos", action="store_true", help="go on past the model's stop tokens")
    add("--use-generation-config", action="store_true", help="the checkpoint's sampling defaults")
    add = parser.add_argument_group("drafting").add_argument
    add("--confidence-threshold", type=float, default=0.0, metavar="C", help="cut below it (0)")
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code (2: the caller's mistake, 130: interrupted)."""
    try:
        arguments = build_parser().parse_args(argv)
        engine, prompts, requests = prepare(arguments)
    except (ValueError, OSError, ImportError) as error:
        tell(f"dspark_jax.generate: {error}")
        return 2
    except KeyboardInterrupt:
        tell("interrupted before the first token")
        return 128 + signal.SIGINT
    except Exception as error:
        return out_of_memory(error)
    return serve(engine, prompts, requests, arguments)


def prepare(arguments: argparse.Namespace) -> tuple[Engine, list[str], list[Request]]:
    """Check the arguments, cheap things first, and load; raises what a caller can mend."""
    check_arguments(arguments)
    given = sampling_options(arguments)
    SamplingParams(**given)
    prompts = read_prompts(arguments)
    notes = set_up_jax()
    engine = load_engine(arguments, max_batch=min(len(prompts), MOST_ROWS))
    for note in notes:
        tell(note)
    inputs: list[Any] = list(prompts)
    if arguments.chat:
        inputs = [
            engine.chat_ids([{"role": "user", "content": text}], arguments.enable_thinking)
            for text in prompts
        ]
    return engine, prompts, engine.prepare(inputs, replace(engine.defaults, **given))


def check_arguments(arguments: argparse.Namespace) -> None:
    """Refuse flags that do not go together."""
    target, draft = arguments.target, arguments.draft
    if draft and not target and draft != "ngram":
        raise ValueError(f"--draft {draft} has no target; add --target")
    if draft and arguments.no_draft:
        raise ValueError("--draft and --no-draft exclude each other; leave one out")
    if target and not draft and not arguments.no_draft and not _is_store(target):
        raise ValueError(f"--target {target} needs --draft DIR, or --no-draft for plain decoding")
    if arguments.json and arguments.show_drafts:
        raise ValueError("--json and --show-drafts exclude each other; leave one out")
    if arguments.enable_thinking and not arguments.chat:
        raise ValueError("--enable-thinking does nothing without --chat; add it or leave both out")
    if arguments.chat and target and Path(target).is_dir():
        from dspark_jax.text import has_chat_template

        if not has_chat_template(Path(target)):
            raise ValueError(
                f"--chat: the tokenizer of {target} has no chat template; leave it out"
            )


def _is_store(target: str) -> bool:
    from convert.store import is_store

    return is_store(target)


def sampling_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The flags of SamplingParams that were given or have a default of their own."""
    named = {name: getattr(arguments, name) for name in SAMPLING_FLAGS}
    return {name: value for name, value in named.items() if value is not None}


def read_prompts(arguments: argparse.Namespace) -> list[str]:
    """The prompts of --prompt, then the lines of --prompt-file; else the default prompt."""
    prompts = list(arguments.prompt)
    name = arguments.prompt_file
    if name is not None:
        try:
            text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"--prompt-file {name} is not UTF-8: {error}") from None
        lines = [line for line in text.split("\n") if line.strip()]
        if not lines:
            raise ValueError(f"--prompt-file {name} holds no prompt; write one a line")
        prompts += lines
    return prompts or [DEFAULT_PROMPT]


def set_up_jax() -> list[str]:
    """Quiet logs that would come before the first line, keep compiled programs; return notes."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.ERROR)  # gpu_note says it
    import jax

    notes = [] if jax.default_backend() != "cpu" else gpu_notes()
    place = jax.config.jax_compilation_cache_dir or str(CACHE.expanduser())  # type: ignore[attr-defined]
    try:
        Path(place).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return [*notes, f"note: compiled programs are not kept: {error}"]
    jax.config.update("jax_compilation_cache_dir", place)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return [*notes, f"note: compiled programs are kept in {place}"]


def gpu_notes(driver: Path = Path("/proc/driver/nvidia/version")) -> list[str]:
    """What to install where jax runs on the CPU of a machine that has an NVIDIA GPU."""
    if os.environ.get("JAX_PLATFORMS"):
        return []  # the user has chosen
    text = driver.read_text(errors="replace") if driver.exists() else ""
    if not text and not shutil.which("nvidia-smi"):
        return []
    found = re.search(r"Kernel Module\D*(\d+)\.", text)
    extra = "cuda12" if found and int(found[1]) < CUDA13_DRIVER else "cuda13"
    return [
        "note: an NVIDIA GPU is present, but jax does not see it; install the extra"
        f" {extra}: pip install 'dspark-jax[{extra}]'"
    ]


def load_engine(arguments: argparse.Namespace, max_batch: int) -> Engine:
    """Load what the arguments name, with a progress bar."""
    from dspark_jax.console import loading_bar
    from dspark_jax.loading import load

    options = {name: getattr(arguments, name) for name in LOAD_FLAGS}
    draft: Any = False if arguments.no_draft else arguments.draft
    with loading_bar() as progress:
        return load(
            arguments.target, draft, max_batch=max_batch, report=tell, progress=progress, **options
        )


def serve(
    engine: Engine, prompts: list[str], requests: list[Request], arguments: argparse.Namespace
) -> int:
    """Decode, write what comes in, and end with the summary."""
    from dspark_jax.console import LEGEND, JsonPrinter, TextPrinter, summary
    from dspark_jax.engine import STREAM_ROUNDS
    from dspark_jax.state import MAX_ROUNDS

    printer: JsonPrinter | TextPrinter
    if arguments.json:
        printer, rounds = JsonPrinter(prompts, requests, sys.stdout), MAX_ROUNDS
    else:
        printer, rounds = TextPrinter(requests, sys.stdout, arguments.show_drafts), STREAM_ROUNDS
    if arguments.show_drafts:
        tell(LEGEND)
    code = 0
    try:
        for _ in engine.serve(requests, rounds):
            printer.update()
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of standard output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        code = out_of_memory(error)
    printer.close()
    sys.stdout.flush()
    tell(summary(requests, engine.max_batch))
    return code


def out_of_memory(error: Exception) -> int:
    """Turn the device's word that memory ran out into a sentence; any other error is a bug."""
    if "RESOURCE_EXHAUSTED" not in str(error):
        raise error
    tell(
        "dspark_jax.generate: the device ran out of memory; lower --max-length, give fewer"
        " prompts or take a smaller model"
    )
    return 2


def tell(line: str) -> None:
    """Write a line for a reader."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

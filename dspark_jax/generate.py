"""The command line: continue prompts, stream the text. Imports nothing heavy before it has to."""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import re
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark_jax.arguments import (
    LOAD_FLAGS,
    build_parser,
    check_arguments,
    read_messages,
    read_prompts,
    sampling_options,
)
from dspark_jax.files import expand
from dspark_jax.request import SamplingParams

if TYPE_CHECKING:
    from dspark_jax.accounting import Request
    from dspark_jax.engine import Engine

CACHE = Path("~/.cache/dspark_jax")
MOST_ROWS = 8  # prompts decoded at once
CUDA13_DRIVER = 580  # the first driver that runs CUDA 13


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
    prompts, conversations = read_prompts(arguments), read_messages(arguments.messages)
    if conversations:
        prompts = [json.dumps(one, ensure_ascii=False) for one in conversations]
    elif arguments.chat:
        conversations = [[{"role": "user", "content": text}] for text in prompts]
    notes = set_up_jax()
    parts = max(arguments.data_parallel, 1)
    engine = load_engine(arguments, max_batch=-(-min(len(prompts), MOST_ROWS) // parts) * parts)
    for note in notes:
        tell(note)
    inputs: list[Any] = list(prompts)
    if conversations:
        inputs = [engine.chat_ids(one, arguments.enable_thinking) for one in conversations]
    return engine, prompts, engine.prepare(inputs, replace(engine.defaults, **given))


def set_up_jax() -> list[str]:
    """Quiet logs that would come before the first line, keep compiled programs; return notes."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.ERROR)  # gpu_note says it
    import jax

    notes = [] if jax.default_backend() != "cpu" else gpu_notes()
    try:
        place = jax.config.jax_compilation_cache_dir or str(expand(CACHE))  # type: ignore[attr-defined]
        Path(place).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
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
    """Decode, write what comes in, and end with the summary.

    Characters that the encoding of standard output lacks are written as escapes.
    """
    from dspark_jax.console import LEGEND, JsonPrinter, PromptLine, TextPrinter, summary
    from dspark_jax.engine import STREAM_ROUNDS
    from dspark_jax.state import MAX_ROUNDS

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    printer: JsonPrinter | TextPrinter
    if arguments.json:
        printer, rounds = JsonPrinter(prompts, requests, sys.stdout), MAX_ROUNDS
    else:
        printer, rounds = TextPrinter(requests, sys.stdout, arguments.show_drafts), STREAM_ROUNDS
    if arguments.show_drafts:
        tell(LEGEND)
    line = PromptLine(sys.stderr, engine.config.decode.prefill_chunk)
    if sys.stderr.isatty():
        engine.watch_prompts(line)
    code = 0
    try:
        try:
            for _ in engine.serve(requests, rounds):
                engine.watch_prompts(None)  # from now on the terminal belongs to the text
                printer.update()
        except KeyboardInterrupt:
            code = 128 + signal.SIGINT
        except OSError:
            raise
        except Exception as error:
            code = out_of_memory(error)
        line.close()
        printer.close()
        sys.stdout.flush()
    except OSError as error:
        return output_lost(error)
    tell(summary(requests))
    return code


def output_lost(error: OSError) -> int:
    """Drop what standard output does not take; a reader that has gone needs no sentence."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return 128 + signal.SIGPIPE
    tell(f"dspark_jax.generate: the output cannot be written: {error.strerror or error}")
    return 2


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

"""What the command line writes: text or JSON Lines on one stream, notes and summary on another."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from dspark_jax import metrics
from dspark_jax.accounting import Request
from dspark_jax.request import Chunk, Origin

if TYPE_CHECKING:
    from collections.abc import Iterator

STYLES: dict[Origin, str] = {
    "draft": "green",
    "corrected": "bold red",
    "bonus": "cyan",
    "target": "default",
}
CLEAR = "\x1b[K"  # from here to the end of the line
LEGEND = "note: green = accepted draft, red = corrected draft, blue = bonus, plain = target alone"


class TextPrinter:
    """Streams the text of the first unfinished request, then the next one's, a line end each."""

    def __init__(self, requests: Sequence[Request], out: TextIO, show_drafts: bool) -> None:
        self._waiting = list(requests)
        self._out = out
        self._write = _coloured(out) if show_drafts else self._write_plain
        self._line_open = False

    def update(self) -> None:
        """Write what has come in since the last call."""
        while self._waiting:
            chunk = self._waiting[0].take_chunk()
            self._write(chunk)
            if chunk.text:
                self._line_open = not chunk.text.endswith("\n")
            if chunk.finish_reason is None:
                break
            self._waiting.pop(0)
            self.close()
        self._out.flush()

    def close(self) -> None:
        """End the last line where text stands on it."""
        if self._line_open:
            self._out.write("\n")
            self._line_open = False

    def _write_plain(self, chunk: Chunk) -> None:
        self._out.write(chunk.text)


class JsonPrinter:
    """Writes one object a line for each finished request, in prompt order."""

    def __init__(self, prompts: Sequence[str], requests: Sequence[Request], out: TextIO) -> None:
        self._waiting = list(zip(prompts, requests, strict=True))
        self._out = out

    def update(self) -> None:
        """Write the requests at the front that have finished."""
        while self._waiting and self._waiting[0][1].finish_reason is not None:
            prompt, request = self._waiting.pop(0)
            self._out.write(json.dumps(describe(prompt, request)) + "\n")
        self._out.flush()

    def close(self) -> None:
        """Every line is complete."""


class PromptLine:
    """Counts the tokens of a long prompt that have run, on a line that it takes away again.

    `out` is a terminal. A prompt of one chunk (at most `chunk` tokens) shows nothing.
    """

    def __init__(self, out: TextIO, chunk: int) -> None:
        self._out = out
        self._chunk = chunk
        self._sent: tuple[Request, int, Any] | None = None
        self._shown = False

    def __call__(self, request: Request, token: Any) -> None:
        """A chunk was sent: wait for the one before it, and say how far that came."""
        sent, self._sent = self._sent, (request, request.prefilled, token)
        total = len(request.prompt_ids)
        if total <= self._chunk:
            return
        if sent and sent[0] is request:
            sent[2].block_until_ready()
            self._write(f"prompt: {sent[1]:,} of {total:,} tokens")
        if request.prefilled == total:
            token.block_until_ready()
            self.close()

    def close(self) -> None:
        """Take the line away."""
        if self._shown:
            self._write("")

    def _write(self, text: str) -> None:
        self._shown = bool(text)
        self._out.write(f"\r{text}{CLEAR}")
        self._out.flush()


def describe(prompt: str, request: Request) -> dict[str, Any]:
    """A finished request as JSON; without rounds the acceptance length is null."""
    result = request.result()
    asked = {} if result.logprobs is None else {"logprobs": result.logprobs}
    return {
        "prompt": prompt,
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "rounds": metrics.rounds([result]),
        "acceptance_length": metrics.acceptance_length([result]),
        "acceptance_lengths": result.acceptance_lengths,
        "proposal_lengths": result.proposal_lengths,
        "seconds": result.seconds,
        "tokens_per_second": len(result.token_ids) / result.seconds,
        **asked,
    }


def summary(requests: Sequence[Request]) -> str:
    """Tokens, seconds, speed, rounds and acceptance length of all requests, finished or not.

    Seconds run from the first admission to the last token.
    """
    tokens = sum(len(request.token_ids) for request in requests)
    spans = [(one.started, one.started + one.seconds) for one in requests if one.started]
    seconds = max(end for _, end in spans) - min(begin for begin, _ in spans) if spans else 0.0
    length = metrics.acceptance_length(requests)
    return (
        f"{tokens} tokens in {seconds:.2f} s ({tokens / seconds if seconds else 0:.1f} tokens/s),"
        f" {metrics.rounds(requests)} rounds, acceptance length"
        f" {'-' if length is None else format(length, '.2f')}"
    )


def _coloured(out: TextIO) -> Callable[[Chunk], None]:
    from rich.console import Console

    console = Console(file=out, highlight=False)

    def write(chunk: Chunk) -> None:
        for piece, origin in zip(chunk.pieces, chunk.origins, strict=True):
            if piece:
                console.out(piece, style=STYLES[origin], end="")

    return write


@contextmanager
def loading_bar() -> Iterator[Callable[[int, int], None]]:
    """A progress bar over the bytes of the weights on standard error, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = (TextColumn("loading weights"), BarColumn(), DownloadColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)

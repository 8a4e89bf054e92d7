"""Text to token ids and back. Imports transformers only where `tokenizers` cannot do the job."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

UNFINISHED = "\ufffd"  # what a decoder shows for bytes that are no whole character (yet)
_VOCABULARIES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


class Tokenizer:
    """The tokenizer of one checkpoint folder.

    `encode_text(text, special_tokens)` and `decode_ids(ids)` (special tokens skipped) come from
    the library that could open the folder.
    """

    def __init__(
        self,
        folder: Path,
        encode_text: Callable[[str, bool], list[int]],
        decode_ids: Callable[[Sequence[int]], str],
        eos_token_id: int | None,
    ) -> None:
        self.folder = folder
        self.eos_token_id = eos_token_id
        self._encode = encode_text
        self._decode = decode_ids

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """Ids of a text, with the tokenizer's own special tokens around it unless told not to."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the prompt {text[:40]!r} is not valid Unicode: {error}") from None
        return self._encode(text, special_tokens)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; special tokens are skipped."""
        return self._decode(ids)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """What ends a text where the checkpoint's files name no stop token."""
        return () if self.eos_token_id is None else (self.eos_token_id,)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], enable_thinking: bool = False
    ) -> str:
        """The prompt that the checkpoint's chat template makes of a conversation.

        Raises ValueError where there is no template or it refuses the messages.
        """
        if not has_chat_template(self.folder):
            raise ValueError(
                f"the tokenizer of {self.folder} has no chat template; give a plain prompt instead"
            )
        opened = _open_with_transformers(self.folder)
        try:
            return opened.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=enable_thinking,
            )
        except Exception as error:  # a template is a program: it may raise anything
            raise ValueError(
                f"the chat template of {self.folder} refused the messages:"
                f" {type(error).__name__}: {error}"
            ) from error


def conversations(name: str, messages: Any) -> list[Sequence[Mapping[str, Any]]]:
    """One conversation or several, as a list; each message has a role and a content.

    Raises ValueError, which calls them `name` and says what is missing.
    """
    single = isinstance(messages, Sequence) and messages and isinstance(messages[0], Mapping)
    several = [messages] if single else messages
    if not _is_list(several) or not all(_is_list(one) and one for one in several):
        raise ValueError(
            f'{name} must be a list of {{"role": ..., "content": ...}}, or a list of such lists,'
            f" got {reprlib.repr(messages)}"
        )
    for index, one in enumerate(several):
        place = "" if single else f" of conversation {index}"
        for number, message in enumerate(one):
            _check_message(f"{name}: message {number}{place}", message)
    return list(several)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _check_message(name: str, message: Any) -> None:
    if not isinstance(message, Mapping):
        raise ValueError(f"{name} must hold role and content, got {reprlib.repr(message)}")
    missing = [key for key in ("role", "content") if key not in message]
    if missing:
        raise ValueError(f"{name} has no {' and no '.join(missing)}")


def open_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint folder; None where the folder holds none."""
    if (folder / "tokenizer.json").exists():
        return _open_fast(folder)
    if not any((folder / name).exists() for name in _VOCABULARIES):
        return None
    slow = _open_with_transformers(folder)
    return Tokenizer(
        folder,
        lambda text, special: slow.encode(text, add_special_tokens=special),
        lambda ids: slow.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False),
        slow.eos_token_id,
    )


def has_chat_template(folder: Path) -> bool:
    """Whether a folder brings a chat template, in any of the places that transformers reads."""
    files = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
    return any((folder / name).exists() for name in files) or bool(
        _read_settings(folder).get("chat_template")
    )


def _open_fast(folder: Path) -> Tokenizer:
    import tokenizers

    path = folder / "tokenizer.json"
    try:
        fast = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises the bare class
        raise ValueError(f"{path} is not a readable tokenizer: {error}") from None
    fast.no_truncation()  # a published file may hold training-time settings
    fast.no_padding()
    eos = _read_settings(folder).get("eos_token")
    name = eos.get("content") if isinstance(eos, dict) else eos
    if not isinstance(name, str | None):
        raise ValueError(f"{folder / 'tokenizer_config.json'}: eos_token {eos!r} is not a token")
    return Tokenizer(
        folder,
        lambda text, special: fast.encode(text, add_special_tokens=special).ids,
        lambda ids: fast.decode(list(ids), skip_special_tokens=True),
        fast.token_to_id(name) if name else None,
    )


def _open_with_transformers(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"transformers cannot open the tokenizer of {folder}: {error}") from error


def _read_settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    return settings if isinstance(settings, dict) else {}


class TextStream:
    """Turns ids into text token by token; the pieces join to the text of all ids at once.

    A piece ends on a whole character. With stop strings, text that may yet turn out to begin one
    is held back; the first stop string met sets `stopped`, and neither it nor anything after it
    comes out. Without a tokenizer every piece is empty.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str] = ()) -> None:
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._window: list[int] = []  # the last ids, from one that stands for whole characters
        self._shown = 0  # characters of the window's text that came out already
        self._held = ""  # text that may begin a stop string

    def push(self, token: int, may_stop: bool = True) -> str:
        """Take one id; give the text that became certain.

        With `may_stop` False the text up to here comes out, and no stop string begins in it.
        """
        if self._tokenizer is None or self.stopped:
            return ""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        whole = text.rstrip(UNFINISHED)
        gained = whole[self._shown :]
        self._shown = max(self._shown, len(whole))
        if gained and whole == text:
            self._shorten(token)
        return self._release(gained) if may_stop else gained

    def finish(self) -> str:
        """Give what was held back, when no further id will come."""
        if self._tokenizer is None or self.stopped:
            return ""
        rest = self._held + self._tokenizer.decode(self._window)[self._shown :]
        self._window, self._shown, self._held = [], 0, ""
        return rest

    def _shorten(self, token: int) -> None:
        """Start the window at an id that is whole by itself: decoding stays linear in the text.

        The window keeps that id because decoders treat the first one apart (leading space).
        """
        assert self._tokenizer is not None
        alone = self._tokenizer.decode([token])
        if alone and UNFINISHED not in alone:
            self._window, self._shown = [token], len(alone)

    def _release(self, gained: str) -> str:
        text = self._held + gained
        places = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if places:
            self.stopped, self._held = True, ""
            return text[: min(places)]
        kept = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)

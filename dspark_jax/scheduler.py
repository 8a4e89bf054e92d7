"""Who waits, who holds a slot, how many rounds the next call runs. Plain Python, no jax."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from dspark_jax.accounting import Request

# Rounds of a call while a request waits for a slot or for its prompt: a slot that falls free
# idles for so many (its end is read while the next call runs), and a prompt waits for no more.
BUSY_ROUNDS = 1
PREFILL_CHUNKS = 4  # between two calls, while rows run
PATIENCE = 8  # calls that a batch stays larger than its rows need, before it shrinks


@dataclass(frozen=True)
class PromptChunk:
    """Some of a request's prompt, for its slot; `last` where the prompt ends with it."""

    slot: int
    request: Request
    token_ids: list[int]
    last: bool


class Scheduler:
    """Requests in order of arrival on their way through the slots of a batch.

    First come, first served: slots are given in order of arrival and prompts are run in that
    order, each to its end. `submit` may be called from any thread, the rest by one at a time.
    A request that has ended, for whatever reason, loses its place at the next `sweep`.
    """

    def __init__(self, max_batch: int, parts: int = 1) -> None:
        self.max_batch = max_batch
        self._parts = parts  # that the slots are split into, all of one size
        self.slots: list[Request | None] = []
        self.vacated: set[int] = set()  # slots whose row on the device may still run
        self._arrived: SimpleQueue[Request] = SimpleQueue()
        self._waiting: deque[Request] = deque()
        self._prompts: deque[Request] = deque()  # with a slot, and a prompt that has not all run
        self._roomy = 0  # calls in a row that fewer slots would have served

    def submit(self, request: Request) -> None:
        """Put a request at the end of the queue."""
        self._arrived.put(request)

    @property
    def busy(self) -> bool:
        """Whether a request waits or holds a slot."""
        return not self._arrived.empty() or bool(self._waiting) or bool(self.live())

    def live(self) -> list[Request]:
        """The requests that hold a slot, in slot order."""
        return [request for request in self.slots if request]

    def running(self) -> list[tuple[int, Request]]:
        """The unfinished requests whose prompt has run, with their slots."""
        return [
            (slot, request)
            for slot, request in enumerate(self.slots)
            if request
            and request.prefilled == len(request.prompt_ids)
            and request.finish_reason is None
        ]

    def sweep(self) -> list[Request]:
        """Take in what has arrived and let go of what has ended; returns what was cut short."""
        while not self._arrived.empty():
            self._waiting.append(self._arrived.get())
        ended = [one for one in (*self.slots, *self._waiting) if one and one.finish_reason]
        for slot, request in enumerate(self.slots):
            if request and request.finish_reason:
                self.slots[slot] = None
                self.vacated.add(slot)
        self._waiting = _unfinished(self._waiting)
        self._prompts = _unfinished(self._prompts)
        return [one for one in ended if one.finish_reason in ("cancelled", "error")]

    def tier(self, requests: int) -> int:
        """Slots of the smallest batch that holds so many requests."""
        return batch_tier(requests, self.max_batch, self._parts)

    def choose_batch(self, ready: Callable[[int], bool]) -> int:
        """Slots that the next call should have.

        All that have arrived get one, up to `max_batch`. A batch shrinks where none of its rows is
        left, or where fewer slots have been enough for PATIENCE calls and `ready` says that a
        batch of so many can run as it is.
        """
        live = len(self.live())
        wanted = self.tier(max(live + len(self._waiting), 1))
        if not live or wanted >= len(self.slots):
            self._roomy = 0
            return wanted
        self._roomy += 1
        if self._roomy <= PATIENCE or not ready(wanted):
            return len(self.slots)
        self._roomy = 0
        return wanted

    def resize(self, batch: int) -> list[int]:
        """Move the live requests to the first of `batch` slots; returns each slot's old one.

        A slot without a request names some old slot too, and is vacated.
        """
        held = [slot for slot, request in enumerate(self.slots) if request]
        free = batch - len(held)
        self.slots = [*self.live(), *[None] * free]
        self.vacated = set(range(len(held), batch))
        return held + [0] * free

    def entering(self, batch: int) -> list[Request]:
        """The requests that get a slot in a batch of this size."""
        return list(self._waiting)[: batch - len(self.live())]

    def enter(self) -> list[tuple[int, Request]]:
        """Give the free slots to the requests that have waited longest."""
        free = [slot for slot, request in enumerate(self.slots) if request is None]
        entered = list(zip(free, list(self._waiting), strict=False))
        for slot, request in entered:
            self.slots[slot] = self._waiting.popleft()
            self.vacated.discard(slot)
            self._prompts.append(request)
        return entered

    def next_chunk(self, size: int) -> PromptChunk | None:
        """At most `size` tokens of the prompt whose turn it is; None where all have run."""
        if not self._prompts:
            return None
        request = self._prompts[0]
        begin = request.prefilled
        part = request.prompt_ids[begin : begin + size]
        request.prefilled += len(part)
        last = request.prefilled == len(request.prompt_ids)
        if last:
            self._prompts.popleft()
        return PromptChunk(self.slots.index(request), request, part, last)

    def chunks_allowed(self) -> int:
        """Prompt chunks before the next call: running rows wait for a few, else one a slot."""
        return PREFILL_CHUNKS if self.running() else max(PREFILL_CHUNKS, len(self.slots))

    def rounds(self) -> int:
        """Rounds of the next call: as many as the least patient of its requests allows, and no
        more than BUSY_ROUNDS while another waits for a slot or for its prompt."""
        most = min(request.patience for _, request in self.running())
        return min(most, BUSY_ROUNDS) if self._waiting or self._prompts else most


def _unfinished(requests: deque[Request]) -> deque[Request]:
    return deque(request for request in requests if request.finish_reason is None)


def batch_tiers(max_batch: int) -> list[int]:
    """Every size that a batch takes, growing."""
    return sorted({batch_tier(count, max_batch) for count in range(1, max_batch + 1)})


def batch_tier(requests: int, max_batch: int, parts: int = 1) -> int:
    """Rows of the smallest batch that holds the requests: a power of two, or `max_batch`.

    In equal parts: rounded up to a multiple of them.
    """
    rows = min(1 << (requests - 1).bit_length(), max_batch)
    return -(-rows // parts) * parts

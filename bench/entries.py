"""Lines of a comparison: what answers the prompts, and what it has left so far."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from bench.datasets import Conversation
from bench.pairs import variant
from bench.progress import progress_bar
from bench.records import Record, Run
from bench.replay import Replay
from bench.serving import Generation, answer, warm_up
from dspark_jax.config import GREEDY_TEMPERATURE, DraftConfig
from dspark_jax.engine import Engine


@dataclass(kw_only=True)
class Entry(ABC):
    """One line of the comparison; who answers is a subclass's affair."""

    name: str
    draft: str
    num_drafts: int
    confidence_threshold: float = 0.0
    records: list[Record] = field(default_factory=list)  # of the first repetition
    seconds: list[float] = field(default_factory=list)  # of all prompts, once a repetition

    @abstractmethod
    def warm_up(
        self, conversations: Sequence[Conversation], generation: Generation, concurrency: int
    ) -> None:
        """Compile and run once whatever the first turns need."""

    @abstractmethod
    def answer(
        self,
        conversations: Sequence[Conversation],
        generation: Generation,
        concurrency: int,
        first_index: int,
    ) -> list[Record]:
        """Answer the first turns, so many at a time; the first draws with seed + first_index."""

    def run(self, generation: Generation, concurrency: int) -> Run:
        """What it has left, with the settings it had."""
        return Run(
            name=self.name,
            draft=self.draft,
            num_drafts=self.num_drafts,
            confidence_threshold=self.confidence_threshold,
            concurrency=concurrency,
            temperature=generation.temperature,
            records=self.records,
            seconds=self.seconds,
        )


@dataclass(kw_only=True)
class EngineEntry(Entry):
    """An engine of this package."""

    engine: Engine

    def warm_up(
        self, conversations: Sequence[Conversation], generation: Generation, concurrency: int
    ) -> None:
        together = min(concurrency, len(conversations))
        warm_up(self.engine, conversations[0], generation, together)

    def answer(
        self,
        conversations: Sequence[Conversation],
        generation: Generation,
        concurrency: int,
        first_index: int,
    ) -> list[Record]:
        records, _ = answer(
            self.engine,
            conversations,
            generation,
            concurrency,
            first_index=first_index,
            most_turns=1,
        )
        return records

    def probe_ceiling(
        self,
        conversations: Sequence[Conversation],
        generation: Generation,
        concurrency: int,
        replayed: int,
    ) -> None:
        """Answer once more, untimed, and note what the laws of draft and target allow.

        Greedy decoding draws nothing, so there is nothing to test; nor is there without a draft.
        """
        engine = self.engine
        if engine.config.draft is None or generation.temperature < GREEDY_TEMPERATURE:
            return
        network = isinstance(engine.config.draft, DraftConfig)  # only it keeps what rounds wrote
        with progress_bar(f"ceiling of {self.name}", len(conversations)) as advance:
            records, _ = answer(
                variant(engine, ceiling=True),
                conversations,
                generation,
                concurrency,
                most_turns=1,
                advance=advance,
                repeat=Replay(engine, replayed) if network and replayed else None,
            )
        self.records = [
            replace(record, batch=timed.batch, sent=timed.sent, arrivals=timed.arrivals)
            for timed, record in zip(self.records, records, strict=True)
        ]

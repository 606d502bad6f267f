"""BenchOptions: what a benchmark measures. The command's defaults are read from here, without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from samewise.draft.tuning import DEFAULTS, SearchTuning, Tuning

PEERS = ("transformers", "llama.cpp", "vllm")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What to measure. `batches` are the numbers of requests at once."""

    proposers: tuple[str, ...] = ("none", "ngram", "auto")
    batches: tuple[int, ...] = (1, 8)
    repeats: int = 5
    max_tokens: int = 96
    verified: float = 1.0  # share of requests
    workload: Path | None = None
    tasks: tuple[str, ...] = ()
    limit: int | None = 2  # questions per task
    synthetic: int | None = None  # length of random prompts instead
    rate: float | None = None  # requests per second; None: all at once
    peers: tuple[str, ...] | None = None  # names of PEERS; None: those that are installed
    ignore_eos: bool = False  # answers go on past their end: as many tokens from every contender
    first_token: int = 512  # length of the prompt whose first token is timed; 0: none is
    inject: tuple[float, ...] = ()  # mismatch rates
    timeline: bool = False
    search_share: float = DEFAULTS.search.share  # of the time, that the proposer skip may search
    out: Path = field(default_factory=lambda: Path("bench-out"))

    @property
    def tuning(self) -> Tuning:
        """That of the engines."""
        return Tuning(search=SearchTuning(share=self.search_share))


__all__ = ["PEERS", "BenchOptions"]

"""Results of requests. Names and shapes are vLLM's, so that code written for vLLM changes one import.

Host only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

ABORTED = "aborted"
"""The stop reason of an answer that was cut off by `abort_all` or by new weights; its tokens are good."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability: the model's own, or the processed one (`SamplingParams.logprobs_mode`).

    `rank` is the token's place among the whole vocabulary, by falling log-probability, then by rising id,
    counted from 1; None for a token that is listed because `logprob_token_ids` names it. `decoded_token` is
    None where text is not wanted (`detokenize=False`).
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class WeightSpan:
    """Under which weights an answer's tokens from number `start` on were computed, up to the next span."""

    start: int
    contract: str
    version: int  # how often weights were replaced before


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of a request's n answers."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_logprobs: list[float]
    seed: int
    # Tokens of the answer that the request's prediction guessed, and of the prediction that are not in it: a
    # function of both, whatever was drafted. 0 where there is no prediction.
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    weights: tuple[WeightSpan, ...] = ()  # several where weights were replaced while it ran

    def finished(self) -> bool:
        """Whether the answer is complete."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times in seconds of a monotonic clock, and counts of drafted (`guessed`) tokens."""

    arrival_time: float
    first_token_time: float | None
    finished_time: float | None
    num_output_tokens: int
    num_accepted_tokens: int
    num_guessed_tokens: int = 0
    num_frames: int = 0  # that committed tokens of this request
    drafters: dict[str, tuple[int, int]] = field(default_factory=dict)  # (guessed, accepted) by drafter

    @property
    def tokens_per_frame(self) -> float | None:
        """Mean tokens of the frames that committed any; None for an unverified request."""
        return self.num_output_tokens / self.num_frames if self.num_frames else None

    @property
    def recomputed_share(self) -> float:
        """The share of drafted tokens that was rolled back."""
        return self.num_rolled_back_tokens / max(1, self.num_guessed_tokens)

    @property
    def num_rolled_back_tokens(self) -> int:
        """Drafted tokens that were wrong, or followed a wrong one."""
        return self.num_guessed_tokens - self.num_accepted_tokens

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def time_per_output_token(self) -> float | None:
        """Seconds per token after the first."""
        if self.finished_time is None or self.first_token_time is None or self.num_output_tokens < 2:
            return None
        return (self.finished_time - self.first_token_time) / (self.num_output_tokens - 1)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request's answers and its prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    contract: str  # of the last token
    metrics: RequestMetrics
    weights_version: int = 0  # of the last token

    @property
    def mixed(self) -> bool:
        """Whether its tokens were computed under more than one contract."""
        return len({span.contract for choice in self.outputs for span in choice.weights}) > 1


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part of one answer committed since the last chunk. A chunk is never taken back."""

    index: int
    text: str
    token_ids: list[int]
    token_logprobs: list[float]
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_accepted: int = 0
    num_guessed: int = 0
    seed: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0  # known at the end: counted in the last chunk
    contract: str = ""  # under which its tokens were computed
    weights_version: int = 0

    def precedes(self, later: Chunk) -> bool:
        """Whether a later chunk of the same choice can be joined to this one: the same weights."""
        return (self.index, self.contract, self.weights_version) == (
            later.index, later.contract, later.weights_version,
        )  # fmt: skip

    def then(self, later: Chunk) -> Chunk:
        """This chunk and the one that follows it, joined."""
        has_logprobs = self.logprobs is not None or later.logprobs is not None
        return Chunk(
            self.index,
            self.text + later.text,
            self.token_ids + later.token_ids,
            self.token_logprobs + later.token_logprobs,
            (self.logprobs or []) + (later.logprobs or []) if has_logprobs else None,
            later.finish_reason,
            later.stop_reason,
            self.num_accepted + later.num_accepted,
            self.num_guessed + later.num_guessed,
            self.seed,
            self.accepted_prediction_tokens + later.accepted_prediction_tokens,
            self.rejected_prediction_tokens + later.rejected_prediction_tokens,
            later.contract,
            later.weights_version,
        )


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """Teacher-forced log-probabilities of a completion: bit-equal to those of generating it."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    cumulative_logprob: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "cumulative_logprob", sum(self.logprobs))


__all__ = [
    "ABORTED",
    "Chunk",
    "CompletionOutput",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "ScoreOutput",
    "WeightSpan",
]

"""What the scheduler may spend, and which requests can never fit. Host only."""

from __future__ import annotations

from dataclasses import dataclass

from samewise.errors import BadPrompt, PromptTooLong
from samewise.types import MAX_TREE_DEPTH, MAX_TREE_NODES


@dataclass(frozen=True, slots=True)
class Limits:
    """Fixed when the engine is built."""

    num_pages: int  # KV pages, the trash page included
    page: int  # tokens of a page
    max_rows: int  # rows of the widest frame
    max_num_seqs: int  # sequences that run at once
    max_model_len: int  # tokens of the longest context
    shared_rows: int | None = None  # rows of the widest frame while sequences generate; None: max_rows
    frame_sizes: tuple[int, ...] = ()  # rows a frame may have; empty: max_rows only
    canonical_rows: int | None = None  # with this many rows of complete drafts a frame is due; None: max_rows
    vocab: int = 2**31
    max_draft: int = 16  # levels of a sequence's draft; of a chain, its guesses
    max_nodes: int = MAX_TREE_NODES  # guesses of a draft tree ...
    min_nodes: int = 16  # ... where many sequences share a frame
    max_depth: int = MAX_TREE_DEPTH  # levels of a draft tree
    burst: int = 1  # tokens an unverified request may take in one step
    deadline: int = 4  # steps a complete draft may wait for other drafts to share its frame
    max_queued: int | None = None  # requests that may wait; None: any number
    prefix_caching: bool = True

    @property
    def longest(self) -> int:
        """Tokens the longest sequence can have: bounded by the context and by the KV cache."""
        return min(self.max_model_len, self._capacity)

    @property
    def _capacity(self) -> int:
        return (self.num_pages - 1) * self.page

    def refuse_misfit(self, prompt_len: int, max_tokens: int) -> None:
        """Raise BadPrompt for a request that could not run even in an empty engine."""
        if prompt_len == 0:
            raise BadPrompt(
                "the prompt is empty; give at least one token (a BOS token will do)", param="prompt"
            )
        if prompt_len + (max_tokens > 0) > self.max_model_len:
            raise PromptTooLong(
                f"the prompt has {prompt_len} tokens and max_model_len is {self.max_model_len}; "
                "shorten it, set truncate_prompt_tokens, or raise max_model_len",
                param="prompt",
            )
        longest = min(prompt_len + max_tokens, self.max_model_len)
        if longest > self._capacity:
            raise PromptTooLong(
                f"the request may grow to {longest} tokens and the KV cache holds {self._capacity}; "
                "lower max_tokens or raise kv_memory",
                param="prompt",
            )


__all__ = ["Limits"]

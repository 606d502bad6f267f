"""Accept or reject drafts: a span and what the target model computed for it → a verdict.

`judge` and `trust` are the only two ways a token may be committed. Host only, pure: no state, no clock.
"""

from __future__ import annotations

from typing import TypeVar

from samewise.types import ROOT, Proposal, Span, Truth, Verdict

T = TypeVar("T")


def judge(span: Span, truth: Truth) -> Verdict:
    """Accept the guesses that the target model's own tokens lead through, then take its next token.

    `truth` starts at the span's last given row, the first whose next token is not known. A span that ends
    inside the given tokens (a prompt chunk) has no such row: it commits KV and no token.
    """
    num_rows = len(span.inputs)
    if num_rows == span.given:  # no draft: one token
        return Verdict(
            span.seq_id, truth.tokens, truth.logprobs, truth.tops, span.start + num_rows, 0, 0, True,
            truth.scores, truth.score_tops, candidates=truth.candidates, ranks=truth.ranks,
            score_ranks=truth.score_ranks,
        )  # fmt: skip
    if num_rows < span.given:
        return Verdict(
            span.seq_id, (), (), (), span.start + num_rows, 0, 0, True, truth.scores, truth.score_tops,
            score_ranks=truth.score_ranks,
        )  # fmt: skip
    guesses = span.inputs[span.given :]
    if span.parents:
        path = _path(guesses, span.parents, truth.tokens)
        num = len(path)
    else:
        path, num = (), _num_matches(guesses, truth.tokens)
    if path:
        rows = (0, *[node + 1 for node in path])
        tokens, logprobs, tops = _at(truth.tokens, rows), _at(truth.logprobs, rows), _at(truth.tops, rows)
        ranks = _at(truth.ranks, rows)
    else:
        tokens, logprobs, tops = truth.tokens[: num + 1], truth.logprobs[: num + 1], truth.tops[: num + 1]
        ranks = truth.ranks[: num + 1]
    return Verdict(
        span.seq_id, tokens, logprobs, tops, span.start + span.given + num, len(guesses), num, True,
        truth.scores, truth.score_tops, span.drafter, path, truth.candidates, ranks, truth.score_ranks,
    )  # fmt: skip


def _at(values: tuple[T, ...], rows: tuple[int, ...]) -> tuple[T, ...]:
    """The values of these rows; none where there are none."""
    return tuple([values[row] for row in rows]) if values else ()


def _num_matches(guesses: tuple[int, ...], answers: tuple[int, ...]) -> int:
    """How many leading guesses of a chain are right."""
    num = 0
    while num < len(guesses) and guesses[num] == answers[num]:
        num += 1
    return num


def _path(guesses: tuple[int, ...], parents: tuple[int, ...], answers: tuple[int, ...]) -> tuple[int, ...]:
    """The right guesses of a tree, from the root on; of equal siblings the first.

    `answers[0]` is the target model's token after the root, `answers[i + 1]` the one after guess i.
    """
    path: list[int] = []
    node, i = ROOT, 0
    answer, left = answers[0], guesses.count(answers[0])
    while left:  # guesses of this token that stand after the node: its child is the first whose parent it is
        i = guesses.index(answer, i)
        if parents[i] == node:
            path.append(i)
            node, answer = i, answers[i + 1]
            left = guesses[i + 1 :].count(answer)
        else:
            left -= 1
        i += 1
    return tuple(path)


def trust(proposal: Proposal, kv_len: int) -> Verdict:
    """Commit a fast pass's tokens unverified, for requests with `verify` off: regular decoding."""
    num = len(proposal.tokens)
    return Verdict(
        proposal.seq_id, proposal.tokens, proposal.logprobs, proposal.tops, kv_len + num, 0, 0, False,
        ranks=proposal.ranks,
    )  # fmt: skip


__all__ = ["judge", "trust"]

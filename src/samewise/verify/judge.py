"""Accept or reject drafts: a span and what the target model computed for it → a verdict.

`judge` and `trust` are the only two ways a token may be committed. Host only, pure: no state, no clock.
"""

from __future__ import annotations

from samewise.types import Proposal, Span, Truth, Verdict


def judge(span: Span, truth: Truth) -> Verdict:
    """Accept the draft's leading matches, then take the target model's own token at the first mismatch.

    `truth` starts at the span's last given row, the first whose next token is not known. A span that ends
    inside the given tokens (a prompt chunk) has no such row: it commits KV and no token.
    """
    rows = len(span.inputs)
    if rows == span.given:  # no draft: one token
        return Verdict(
            span.seq_id, truth.tokens, truth.logprobs, truth.tops, span.start + rows, 0, 0, True,
            truth.scores, truth.score_tops,
        )  # fmt: skip
    if rows < span.given:
        return Verdict(span.seq_id, (), (), (), span.start + rows, 0, 0, True, truth.scores, truth.score_tops)
    draft, tokens = span.inputs[span.given :], truth.tokens
    n = 0
    while n < len(draft) and draft[n] == tokens[n]:
        n += 1
    return Verdict(
        span.seq_id,
        tokens[: n + 1],
        truth.logprobs[: n + 1],
        truth.tops[: n + 1],
        span.start + span.given + n,
        len(draft),
        n,
        True,
        truth.scores,
        truth.score_tops,
        span.drafter,
        span.branch,
    )


def winning_branches(verdicts: list[Verdict]) -> list[Verdict]:
    """One verdict per sequence: the branch with the most tokens wins, the first of equals.

    The guesses of the other branches are added to its `lost_guesses`.
    """
    best_of: dict[int, Verdict] = {}
    for verdict in verdicts:
        best = best_of.get(verdict.seq_id)
        if best is None:
            best_of[verdict.seq_id] = verdict
            continue
        winner, loser = (verdict, best) if len(verdict.tokens) > len(best.tokens) else (best, verdict)
        drafter = winner.drafter or loser.drafter
        lost = best.lost_guesses + loser.guessed
        best_of[verdict.seq_id] = winner._replace(lost_guesses=lost, drafter=drafter)
    return list(best_of.values())


def trust(proposal: Proposal, kv_len: int) -> Verdict:
    """Commit a fast pass's tokens unverified, for requests with `verify` off: regular decoding."""
    num = len(proposal.tokens)
    return Verdict(
        proposal.seq_id, proposal.tokens, proposal.logprobs, proposal.tops, kv_len + num, 0, 0, False
    )


__all__ = ["judge", "trust", "winning_branches"]

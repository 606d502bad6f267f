"""Guesses × truth → verdict. The only two ways a token may become public.

Host only, pure: no state, no clock, no tensor.
"""

from __future__ import annotations

from samewise.types import Proposal, Span, Truth, Verdict


def judge(span: Span, truth: Truth) -> Verdict:
    """Keep the replay's tokens up to and including the first one the guesses got wrong.

    `truth` starts at the span's last given row: the first row whose token is not known. A span that
    ends inside the given tokens (a prompt chunk) has no such row, and commits KV alone.
    """
    rows = len(span.inputs)
    if rows == span.given:  # nothing was guessed: the replay's own token, and one more row of KV
        return Verdict(
            span.seq_id, truth.tokens, truth.logprobs, truth.tops, span.start + rows, 0, 0, True,
            truth.scores, truth.score_tops,
        )  # fmt: skip
    if rows < span.given:
        return Verdict(span.seq_id, (), (), (), span.start + rows, 0, 0, True, truth.scores, truth.score_tops)
    guesses, answers = span.inputs[span.given :], truth.tokens
    n = 0
    while n < len(guesses) and guesses[n] == answers[n]:
        n += 1
    return Verdict(
        span.seq_id,
        answers[: n + 1],
        truth.logprobs[: n + 1],
        truth.tops[: n + 1],
        span.start + span.given + n,
        len(guesses),
        n,
        True,
        truth.scores,
        truth.score_tops,
        span.drafter,
        span.branch,
    )


def winning_branches(verdicts: list[Verdict]) -> list[Verdict]:
    """One verdict per sequence: of branches the longest accepted wins, the first of equals.

    What the others guessed is counted as spent beside it: somebody paid for it.
    """
    won: dict[int, Verdict] = {}
    for verdict in verdicts:
        best = won.get(verdict.seq_id)
        if best is None:
            won[verdict.seq_id] = verdict
            continue
        winner, loser = (verdict, best) if len(verdict.tokens) > len(best.tokens) else (best, verdict)
        drafter = winner.drafter or loser.drafter
        won[verdict.seq_id] = winner._replace(spent=best.spent + loser.guessed, drafter=drafter)
    return list(won.values())


def trust(proposal: Proposal, kv_len: int) -> Verdict:
    """Take a fast path's tokens as they come: regular decoding, without the promise."""
    num = len(proposal.tokens)
    return Verdict(
        proposal.seq_id, proposal.tokens, proposal.logprobs, proposal.tops, kv_len + num, 0, 0, False
    )


__all__ = ["judge", "trust", "winning_branches"]

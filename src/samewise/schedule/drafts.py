"""A sequence's draft and tokens: how far a draft may grow, which guesses are kept, what ends it."""

from __future__ import annotations

from samewise.schedule.limits import Limits
from samewise.types import Branch, Finish, Proposal, Sequence


def draft_room(seq: Sequence, limits: Limits) -> int:
    """How many more guesses can be used."""
    # Verification adds one token of its own, so the last token need not be guessed.
    left = seq.max_len - len(seq.tokens) - len(seq.draft) - 1
    max_draft = min(limits.max_draft, limits.max_rows - 1)
    return min(left, max_draft - len(seq.draft))


def burst_room(seq: Sequence, limits: Limits) -> int:
    """Tokens an unverified sequence may take in one step; at least one, so that it can end."""
    return max(1, min(seq.max_len - len(seq.tokens), limits.burst))


def extend_draft(seq: Sequence, proposal: Proposal, limits: Limits) -> None:
    """Append a proposal's guesses and branches. Invalid ones are dropped: proposers are not trusted."""
    if not seq.draft:
        seq.drafter = proposal.drafter
    stop_ids = seq.request.sampling.stop_ids
    before = len(seq.draft)
    guesses = proposal.tokens[: max(0, draft_room(seq, limits))]
    if seq.guide is not None:
        guesses = guesses[: seq.guide.fits(seq.draft, guesses)]
    for token in guesses:
        if not 0 <= token < limits.vocab:
            break
        seq.draft.append(token)
        if token in stop_ids:  # guesses after the end of the text are useless
            break
    grown = len(seq.draft) > before
    seq.branches = tuple(branch for branch in proposal.branches if _is_valid(seq, branch, limits))
    more = proposal.more and grown and draft_room(seq, limits) > 0
    seq.drafting = more and seq.draft[-1] not in stop_ids


def _is_valid(seq: Sequence, branch: Branch, limits: Limits) -> bool:
    """Whether a branch starts inside the draft, ends within the limits and follows the grammar."""
    at, tokens = branch
    room = seq.max_len - len(seq.tokens) - 1
    max_draft = min(limits.max_draft, limits.max_rows - 1, room)
    inside = bool(tokens) and 0 <= at <= len(seq.draft) and at + len(tokens) <= max_draft
    if not inside or not all(0 <= token < limits.vocab for token in tokens):
        return False
    return seq.guide is None or seq.guide.fits(seq.draft[:at], tokens) == len(tokens)


def append_tokens(seq: Sequence, new: tuple[int, ...]) -> int:
    """Append tokens until one, or the length limit, ends the sequence. Returns how many were added."""
    tokens, stop_ids = seq.tokens, seq.request.sampling.stop_ids
    before, guide = len(tokens), seq.guide
    for token in new[: seq.max_len - before]:
        if guide is not None:
            seq.finish = guide.take(token)
            if seq.finish is Finish.ABORT:  # the grammar does not allow this token
                break
        tokens.append(token)
        if token in stop_ids:
            seq.finish, seq.stop_id = Finish.STOP, token
        if seq.finish is not None:
            break
    if new and len(tokens) >= seq.max_len and seq.finish is None:
        seq.finish = Finish.LENGTH  # also with max_tokens=0: the prompt was only to be scored
    return len(tokens) - before


def clear_draft(seq: Sequence) -> None:
    """Drop the draft: it was verified, or its pages are gone."""
    if seq.draft:
        seq.draft.clear()
    seq.drafter, seq.drafting, seq.ready_since, seq.branches = "", False, None, ()


__all__ = ["append_tokens", "burst_room", "clear_draft", "draft_room", "extend_draft"]

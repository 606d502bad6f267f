"""A sequence's draft and tokens: how far a draft may grow, which guesses are kept, what ends it."""

from __future__ import annotations

from operator import lt

from samewise.schedule.limits import Limits
from samewise.types import ROOT, Finish, Proposal, Sequence


def draft_room(seq: Sequence, limits: Limits) -> int:
    """How many more levels of guesses can be used."""
    # Verification adds one token of its own, so the last token need not be guessed.
    left = seq.max_len - len(seq.tokens) - len(seq.draft) - 1
    max_draft = min(limits.max_draft, limits.max_rows - 1)
    return min(left, max_draft - len(seq.draft))


def max_tree_nodes(limits: Limits, num_running: int) -> int:
    """How many guesses a tree may have. Fewer where many sequences share a frame."""
    share = (limits.canonical_rows or limits.max_rows) // max(1, num_running)
    return min(limits.max_nodes, max(share, limits.min_nodes), limits.max_rows - 1)


def burst_room(seq: Sequence, limits: Limits) -> int:
    """Tokens an unverified sequence may take in one step; at least one, so that it can end."""
    return max(1, min(seq.max_len - len(seq.tokens), limits.burst))


def extend_draft(seq: Sequence, proposal: Proposal, limits: Limits) -> None:
    """Append a proposal's guesses. Invalid ones are dropped: proposers are not trusted."""
    if not seq.draft:
        seq.drafter = proposal.drafter
    before = len(seq.draft)
    if proposal.parents:
        _append_tree(seq, proposal, limits)
    else:
        _append_chain(seq, proposal.tokens[: max(0, draft_room(seq, limits))], limits)
    more = proposal.more and len(seq.draft) > before and draft_room(seq, limits) > 0
    seq.drafting = more and seq.draft[-1] not in seq.request.sampling.stop_ids


def _append_chain(seq: Sequence, guesses: tuple[int, ...], limits: Limits) -> None:
    """Append guesses, each after the one before, up to the first invalid one or the end of the text."""
    stop_ids = seq.request.sampling.stop_ids
    draft, parents = seq.draft, seq.parents
    if draft and draft[-1] in stop_ids:
        return
    if seq.guide is not None:
        guesses = guesses[: seq.guide.fits(path_tokens(draft, parents, len(draft) - 1), guesses)]
    for token in guesses:
        if not 0 <= token < limits.vocab:
            break
        parents.append(len(draft) - 1)
        draft.append(token)
        if token in stop_ids:  # guesses after the end of the text are useless
            break


def _append_tree(seq: Sequence, proposal: Proposal, limits: Limits) -> None:
    """Append the nodes of a tree. A node that is invalid goes with all that follows it."""
    draft, parents, stop_ids = seq.draft, seq.parents, seq.request.sampling.stop_ids
    max_depth = min(limits.max_depth, limits.max_draft, seq.max_len - len(seq.tokens) - 1)
    max_nodes = min(limits.max_nodes, limits.max_rows - 1)
    plain = not draft and seq.guide is None and stop_ids.isdisjoint(proposal.tokens)
    if plain and _is_valid_tree(proposal, limits.vocab, max_nodes, max_depth):
        draft += proposal.tokens
        parents += proposal.parents
        return
    depths = {ROOT: 0}
    for node, parent in enumerate(parents):
        depths[node] = depths[parent] + 1
    place = {node: node for node in depths}  # where a node of the proposal stands in the draft
    for node, (token, parent) in enumerate(
        zip(proposal.tokens, proposal.parents, strict=False), start=len(draft)
    ):
        at = place.get(parent)
        if at is None or len(draft) >= max_nodes or depths[at] >= max_depth or not 0 <= token < limits.vocab:
            continue
        if at != ROOT and draft[at] in stop_ids:
            continue
        if seq.guide is not None and not seq.guide.fits(path_tokens(draft, parents, at), (token,)):
            continue
        place[node] = len(draft)
        depths[len(draft)] = depths[at] + 1
        draft.append(token)
        parents.append(at)


def _is_valid_tree(proposal: Proposal, vocab: int, max_nodes: int, max_depth: int) -> bool:
    """Whether every node can be taken as it is; by built-in functions, as this is asked at every step."""
    tokens, parents = proposal.tokens, proposal.parents
    return (
        0 < len(tokens) == len(parents) <= max_nodes
        and min(tokens) >= 0
        and max(tokens) < vocab
        and min(parents) >= ROOT
        and all(map(lt, parents, range(len(parents))))
        and (len(parents) <= max_depth or _depth(parents) <= max_depth)
    )


def _depth(parents: tuple[int, ...]) -> int:
    """Levels of a tree."""
    depths = [0]  # of the root, then of each node
    for parent in parents:
        depths.append(depths[parent + 1] + 1)
    return max(depths)


def path_tokens(draft: list[int], parents: list[int], node: int) -> list[int]:
    """The tokens of a draft from the first level down to a node."""
    tokens: list[int] = []
    while node != ROOT:
        tokens.append(draft[node])
        node = parents[node]
    return tokens[::-1]


def append_tokens(seq: Sequence, new: tuple[int, ...]) -> int:
    """Append tokens until one, or the length limit, ends the sequence. Returns how many were added."""
    tokens, stop_ids = seq.tokens, seq.request.sampling.stop_ids
    before, guide = len(tokens), seq.guide
    for token in new[: seq.max_len - before]:
        if guide is not None:
            seq.finish = guide.take(token)
            if seq.finish in (Finish.ABORT, Finish.ERROR):  # the grammar does not allow this token, or fails
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
        seq.parents.clear()
    seq.drafter, seq.drafting, seq.ready_since = "", False, None


__all__ = [
    "append_tokens",
    "burst_room",
    "clear_draft",
    "draft_room",
    "extend_draft",
    "max_tree_nodes",
    "path_tokens",
]

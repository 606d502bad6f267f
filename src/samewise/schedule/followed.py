"""Describe the frame in flight for a follow-up: all that is known of the next frame before it lands."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

from samewise.follow_up import FollowedSequence, FrameToFollow
from samewise.schedule.drafts import max_tree_nodes
from samewise.schedule.limits import Limits
from samewise.schedule.paging import Paging
from samewise.types import Sequence, Span


def frame_to_follow(
    spans: list[Span], running: Mapping[int, Sequence], paging: Paging, limits: Limits
) -> FrameToFollow | None:
    """The frame of these spans; None where the next one needs the loop's decisions.

    A follow-up has the same sequences in the same order. Each must have had its last known token and its
    guesses in the frame, and be verified by its tokens alone. Free pages are taken for its next draft.
    """
    if len(spans) != len(running):
        return None
    max_nodes = max_tree_nodes(limits, len(running))
    seq_ids = [span.seq_id for span in spans]
    sequences, inputs, parents, stop_ids = array("q"), array("i"), array("i"), array("i")
    for span in spans:
        seq = running.get(span.seq_id)
        if seq is None or not _is_plain(seq, span):
            return None
        num_rows, num_tokens, stops = len(span.inputs), len(seq.tokens), seq.request.sampling.stop_ids
        paging.reserve(seq, min(num_tokens + num_rows, seq.max_len) + max_nodes)
        sequences.extend(
            FollowedSequence(
                span.seq_id, num_rows, len(span.parents), span.start, seq.max_len, len(seq.pages), len(stops)
            )
        )  # fmt: skip
        inputs.append(seq.tokens[-1])  # the span's own may still have been on the device
        inputs.extend(span.inputs[1:])
        parents.extend(span.parents)
        stop_ids.extend(stops)
    pages = b"".join([running[seq_id].pages for seq_id in seq_ids])
    max_depth = min(limits.max_depth, limits.max_draft, limits.max_rows - 1)
    return FrameToFollow(
        seq_ids, sequences, inputs, parents, pages, stop_ids, limits.page, max_nodes, max_depth,
        limits.max_rows,
    )  # fmt: skip


def _is_plain(seq: Sequence, span: Span) -> bool:
    """Whether the sequence's next tokens follow from the span's outputs alone, and its next span too."""
    request = seq.request
    return (
        span.given == 1
        and span.start + 1 == len(seq.tokens)
        and not span.targets
        and not seq.drafting
        and seq.guide is None
        and request.verify
        and request.speculate
    )


__all__ = ["frame_to_follow"]

"""`ngram`, `recycle` and the trees of `auto`: how they follow asks and verdicts."""

from array import array

import numpy as np
import pytest
from tree_cases import DRAFTERS, VOCAB

from samewise.draft.base import Fallback, NoDrafts
from samewise.draft.tree_drafter import Sources, TreeDrafter
from samewise.draft.tree_proposer import TreeProposer
from samewise.draft.tuning import DEFAULTS, SuffixTuning, TreeTuning
from samewise.types import ROOT, Ask, Candidates, Sampling, Verdict

BOTH = pytest.mark.parametrize("make", DRAFTERS)
REPEATING = [1, 2, 3, 4] * 6


def ask(seq_id, tokens, room=16, draft=(), salt=b"", prompt_len=4, prediction=(), max_nodes=16):
    return Ask(seq_id, list(tokens), prompt_len, list(draft), len(tokens) - 1, array("i"), Sampling(), room,
               salt, max_nodes=max_nodes, prediction=prediction)  # fmt: skip


def proposer(make=TreeDrafter, sources=Sources.ALL, tuning=DEFAULTS.trees):
    return TreeProposer(make(VOCAB, sources, tuning), sources, tuning)


def verdict(seq_id, tokens, length, rows=None, **more):
    """Tokens that make a sequence so long; `rows`: (input, first of eight candidates)."""
    candidates = None
    if rows is not None:
        ids = np.array([range(first, first + 8) for _, first in rows], np.int32)
        candidates = Candidates(tuple(token for token, _ in rows), ids)
    return Verdict(seq_id, tuple(tokens), (), (), length - 1, 0, 0, candidates=candidates, **more)


@BOTH
@pytest.mark.parametrize(
    ("sources", "wants"), [(Sources.SUFFIXES, False), (Sources.ROWS, True), (Sources.ALL, True)]
)
def test_names_and_candidates(make, sources, wants):
    made = proposer(make, sources)
    assert made.name == {Sources.SUFFIXES: "ngram", Sources.ROWS: "recycle", Sources.ALL: "tree"}[sources]
    assert made.wants_candidates is wants
    assert Fallback([NoDrafts(), made]).wants_candidates is wants


@BOTH
def test_repeating_text_is_drafted_within_room_and_nodes(make):
    made = proposer(make, Sources.SUFFIXES)
    (proposal,) = made.propose([ask(0, REPEATING, room=3)])
    assert proposal.drafter == "ngram"
    assert proposal.tokens[:3] == (1, 2, 3)
    assert proposal.parents[:3] == (ROOT, 0, 1)
    assert len(made.propose([ask(1, REPEATING, max_nodes=2)])[0].tokens) == 2
    assert made.propose([ask(2, list(range(20)))]) == []
    assert made.propose([ask(0, REPEATING, draft=[1])]) == []
    assert made.propose([]) == []


@BOTH
def test_rows_of_verdicts_are_recycled(make):
    made = proposer(make, Sources.ROWS)
    made.meet([ask(0, [5, 6, 7, 8], room=0)])
    made.observe([verdict(0, (), 2)])  # a piece of the prompt
    # The first row's input may be a token that was still on the device.
    made.observe([verdict(0, (9,), 5, [(0, 20)])])
    made.observe([verdict(0, (11, 12), 7, [(9, 30), (10, 40), (11, 50)], path=(1,))])
    for token, first in ((8, 20), (9, 30), (10, 40), (11, 50)):
        (proposal,) = made.propose([ask(1, [1, 2, 3, token])])
        assert set(proposal.tokens) <= set(range(first, first + 8))
        made.forget(1)


@BOTH
def test_a_sequence_is_indexed_again_where_its_text_is_another(make):
    made = proposer(make)
    made.propose([ask(0, list(range(20)))])
    (proposal,) = made.propose([ask(0, REPEATING)])  # the same id with another text
    assert proposal.tokens[0] == 1
    made.observe([verdict(0, (5,), 99)])  # tokens between were missed
    made.observe([verdict(0, (6,), 100)])  # not known any more
    assert made.propose([ask(0, REPEATING)])[0].tokens[0] == 1
    made.observe([verdict(0, (1,), 25)])
    assert made.propose([ask(0, [*REPEATING, 1, 2])])[0].tokens[0] == 3  # a token that no verdict named


@BOTH
def test_after_recovery_sequences_are_met_anew(make):
    made = proposer(make)
    made.meet([ask(0, REPEATING, room=0)])
    made.recover()
    made.observe([verdict(0, (1,), 25)])
    made.forget(0)
    assert made.propose([ask(0, [*REPEATING, 1])])[0].tokens[0] == 2


@BOTH
def test_a_prediction_is_drafted_and_found_again_after_recovery(make):
    made, predicted = proposer(make), tuple(range(20, 50))
    (proposal,) = made.propose([ask(0, [1, 2, 3, 4], prediction=predicted)])
    assert proposal.tokens[:10] == predicted[:10]
    made.recover()
    (proposal,) = made.propose([ask(0, [1, 2, 3, 4, 20, 21, 22], prediction=predicted)])
    assert proposal.tokens[:10] == predicted[3:13]


@BOTH
def test_new_weights_clear_what_other_weights_made(make):
    made = proposer(make)
    made.renew("first")
    made.meet([ask(0, REPEATING, room=0)])
    made.forget(0)
    assert made.propose([ask(1, [9, 8, 1, 2])])
    made.forget(1)
    made.renew("second")
    assert made.propose([ask(2, [9, 8, 1, 2])]) == []


@BOTH
def test_memory_and_nodes_are_reported(make):
    made = proposer(make)
    (proposal,) = made.propose([ask(0, REPEATING)])
    made.observe([verdict(0, (1,), 25)._replace(guessed=16, accepted=0, drafter="tree")])
    made.observe([verdict(0, (2, 3), 27)._replace(guessed=16, accepted=1, drafter="tree")])
    report = made.stats()["tree"]
    assert (report["trees"], report["nodes"], report["accepted"]) == (1, len(proposal.tokens), 1)
    assert report["table_bytes"] == VOCAB * 32
    assert report["sequence_bytes"] > 0
    made.forget(0)
    report = made.stats()["tree"]
    assert report["store_bytes"] > 0
    assert report["sequence_bytes"] == 0


@BOTH
def test_a_long_text_is_indexed_over_several_steps(make):
    """2 of 26 tokens and a separator are indexed in a step; there is no tree before the last of them."""
    made = proposer(make, tuning=TreeTuning(suffixes=SuffixTuning(tokens_per_step=2)))
    predicted = (1, 2)
    long = ask(0, REPEATING, prompt_len=24, prediction=predicted)
    made.meet([long, ask(1, [5, 6, 5], prompt_len=3)])
    for _ in range(13):
        assert not [proposal for proposal in made.propose([long]) if proposal.seq_id == 0]
        made.index_texts()
    assert [proposal.seq_id for proposal in made.propose([long])] == [0]
    made.index_texts()
    later = [ask(0, REPEATING, prompt_len=24, prediction=predicted), ask(1, [5, 6, 5], prompt_len=3)]
    assert [proposal.seq_id for proposal in made.propose(later)] == [0, 1]
    made.index_texts()


@BOTH
def test_a_text_may_go_or_have_new_tokens_before_it_is_indexed(make):
    made = proposer(make, tuning=TreeTuning(suffixes=SuffixTuning(tokens_per_step=5)))
    made.meet([ask(0, REPEATING, prompt_len=24), ask(1, REPEATING, prompt_len=24)])
    made.observe([verdict(0, (1, 2), 26), verdict(1, (1,), 25)])
    made.forget(1)
    for _ in range(4):
        assert made.propose([ask(0, [*REPEATING, 1, 2], prompt_len=24)]) == []
        made.index_texts()
    (proposal,) = made.propose([ask(0, [*REPEATING, 1, 2], prompt_len=24)])
    assert proposal.tokens[0] == 3
    assert made.stats()["tree"]["sequence_bytes"] > 0
    made.recover()
    made.index_texts()
    assert made.stats()["tree"]["sequence_bytes"] == 0


@BOTH
def test_only_the_end_of_a_long_prompt_is_indexed(make):
    tuning = TreeTuning(suffixes=SuffixTuning(indexed_tokens=8))
    made = proposer(make, tuning=tuning)
    text = [7, 8, 9, *range(20, 40), 7, 8]
    assert made.propose([ask(0, text, prompt_len=len(text))]) == []
    assert made.propose([ask(1, REPEATING, prompt_len=len(REPEATING))])

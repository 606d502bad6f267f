"""What tests of draft trees share: both drafters, one sequence at a time, and random rows."""

import random

import numpy as np
import pytest

from samewise.draft.native.drafter import NativeDrafter
from samewise.draft.recycle import WIDTH
from samewise.draft.tree import Limit, RowPrices
from samewise.draft.tree_drafter import Committed, Sources, TreeDrafter
from samewise.kernels.native.build import compiler_available
from samewise.types import ROOT

VOCAB = 60

needs_compiler = pytest.mark.skipif(not compiler_available(), reason="needs a C++ compiler")
DRAFTERS = [
    pytest.param(TreeDrafter, id="python"),
    pytest.param(NativeDrafter, id="native", marks=needs_compiler),
]


def random_rows(rng, choices):
    """A top 8 for each choice, which comes first."""
    rows = [[choice, *rng.sample([t for t in range(VOCAB) if t != choice], WIDTH - 1)] for choice in choices]
    return np.array(rows, np.int32)


def chain(seq_id, last, tokens, rows):
    """Tokens committed after `last`, each with the candidates of the row that chose it."""
    return Committed(
        seq_id, tuple(tokens), tuple(range(len(tokens))), (last, *tokens[:-1]), np.array(rows, np.int32)
    )


def grow(drafter, seq_id, max_nodes, min_prob=0.0, max_depth=64):
    """A tree for one sequence whose nodes cost nothing."""
    (tree,), _ = drafter.grow([Limit(seq_id, max_nodes, max_depth)], RowPrices.free(1, max_nodes), min_prob)
    return tree


def drafter_after(make, seed, num_sequences=3, salt=b"", sources=Sources.ALL):
    """A drafter that has seen random sequences, and the id of one that goes on."""
    rng, drafter = random.Random(seed), make(VOCAB, sources)
    for number in range(num_sequences):
        prompt = [rng.randrange(VOCAB // 3) for _ in range(40)]
        last = prompt[-1]
        drafter.begin(number, prompt, salt)
        for _ in range(30):
            grow(drafter, number, 12)
            tokens = [rng.randrange(VOCAB // 3) for _ in range(rng.randrange(1, 4))]
            drafter.commit([chain(number, last, tokens, random_rows(rng, tokens))])
            last = tokens[-1]
        if number + 1 < num_sequences:
            drafter.forget(number)
    return drafter, num_sequences - 1


def check_tree(tree, max_nodes):
    """The form of a tree: parents first, siblings differ, depth first with the likeliest child first."""
    assert len(tree) <= max_nodes
    assert len(tree.tokens) == len(tree.parents) == len(tree.probs)
    for node, parent in enumerate(tree.parents):
        assert ROOT <= parent < node
        assert 0.0 < tree.probs[node] <= (1.0 if parent == ROOT else tree.probs[parent])
        siblings = [tree.probs[i] for i in range(node + 1) if tree.parents[i] == parent]
        assert siblings == sorted(siblings, reverse=True)
        on_path, above = [], node - 1  # depth first: the parent is the node before, or an ancestor of it
        while above != ROOT:
            on_path.append(above)
            above = tree.parents[above]
        assert parent in {*on_path, ROOT}
    assert len(set(zip(tree.parents, tree.tokens, strict=True))) == len(tree)
    assert all(0 <= token < VOCAB for token in tree.tokens)

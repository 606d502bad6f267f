"""Follow-ups of the C++ drafter: what judging, committing, growing and packing one after another give."""

import random
from array import array
from itertools import chain

import numpy as np
import pytest
from tree_cases import VOCAB, needs_compiler

from samewise.draft.native.drafter import NativeDrafter
from samewise.draft.recycle import WIDTH
from samewise.draft.tree import DraftTree, Limit, RowPrices
from samewise.draft.tree_drafter import Committed, Sources, TreeDrafter
from samewise.execute.pack import numbers_of
from samewise.follow_up import FollowedSequence, FrameOutputs, FrameToFollow
from samewise.types import Sampling, Span, Truth
from samewise.verify.judge import judge

pytestmark = needs_compiler

PAGE, MAX_DEPTH, ROW_LEN = 4, 5, 2 + WIDTH


class Text:
    """A sequence of a frame: its tokens, its page table, and the tree that is being verified."""

    def __init__(self, seq_id, rng, max_len=10_000, stop_ids=(), num_pages=60):
        self.seq_id, self.max_len, self.stop_ids = seq_id, max_len, stop_ids
        self.tokens = [rng.randrange(VOCAB // 3) for _ in range(rng.randrange(2, 20))]
        self.pages = array("i", rng.sample(range(1, 1000), num_pages))
        self.tree, self.given, self.reads = DraftTree(), 1, 0

    @property
    def span(self):
        parents = self.tree.parents
        if parents == tuple(range(-1, len(parents) - 1)):
            parents = ()
        start = len(self.tokens) - self.given
        inputs = (*self.tokens[start:], *self.tree.tokens)
        return Span(
            self.seq_id, start, inputs, self.given, self.pages, Sampling(), self.tokens, 1, parents=parents
        )

    def commit(self, rows):
        """The verdict on the rows, and what a drafter is told of it."""
        span, rows = self.span, rows[self.given - 1 :]
        verdict = judge(span, Truth(tuple(rows[:, 0].tolist()), (0.0,) * len(rows)))
        self.tokens += verdict.tokens
        self.given = 1
        path = [node + 1 for node in verdict.path] if verdict.path else range(1, len(verdict.tokens))
        inputs = span.inputs[span.given - 1 :]
        return verdict, Committed(self.seq_id, verdict.tokens, (0, *path), inputs, rows[:, 2:])

    def moves(self, verdict):
        first = verdict.kv_len - len(verdict.path)
        return [
            (self.slot(first + node), self.slot(first + i))
            for i, node in enumerate(verdict.path)
            if node != i
        ]

    def slot(self, position):
        return self.pages[position // PAGE] * PAGE + position % PAGE


def frame_of(texts, max_nodes, max_rows=256):
    """Of texts that generate; those without a token of the frame in flight (`reads`) read more of it."""
    spans = [text.span for text in texts]
    rows = [
        FollowedSequence(
            text.seq_id, len(span.inputs), span.given, len(span.parents), span.start,
            text.reads and text.reads + 3, text.reads, text.max_len, len(text.pages), len(text.stop_ids),
        )
        for text, span in zip(texts, spans, strict=True)
    ]  # fmt: skip
    return FrameToFollow(
        [text.seq_id for text in texts],
        sum(not text.reads for text in texts),
        array("q", chain.from_iterable(rows)),
        array("i", chain.from_iterable(span.inputs for span in spans)),
        array("i", chain.from_iterable(span.parents for span in spans)),
        array("i", chain.from_iterable(range(text.reads) for text in texts)),
        b"".join(text.pages for text in texts),
        array("i", chain.from_iterable(text.stop_ids for text in texts)),
        PAGE, max_nodes, MAX_DEPTH, max_rows,
    )  # fmt: skip


def random_outputs(rng, texts):
    """[rows, 10] for each text: often a guess's own child is right."""
    outputs = []
    for text in texts:
        rows = np.zeros((text.given + len(text.tree), ROW_LEN), np.int32)
        for row in range(len(rows)):
            children = [
                token
                for token, parent in zip(text.tree.tokens, text.tree.parents, strict=True)
                if parent == row - text.given
            ]
            choice = rng.choice(children) if children and rng.random() < 0.7 else rng.randrange(VOCAB // 3)
            others = rng.sample([token for token in range(VOCAB) if token != choice], WIDTH - 1)
            rows[row] = (choice, rng.randrange(1000), choice, *others)
        outputs.append(rows)
    return outputs


def run(drafter, frame, outputs, prices, max_nodes, *, candidates=True):
    rows = np.concatenate(outputs)
    follower = drafter.follower(frame, prices, max_nodes)
    follow_up = follower.run(FrameOutputs(rows.ctypes.data, ROW_LEN, 2 if candidates else 0))
    return follower, follow_up


def begun(drafters, texts, salt=b""):
    for drafter in drafters:
        for text in texts:
            drafter.begin(text.seq_id, list(text.tokens), salt)


@pytest.mark.parametrize("sources", list(Sources))
@pytest.mark.parametrize("seed", range(3))
def test_a_follow_up_gives_what_the_steps_one_by_one_give(seed, sources):
    rng, num = random.Random(seed), 4
    texts = [Text(i, rng) for i in range(num)]
    texts[1].given = 2  # the end of a prompt
    native, reference = NativeDrafter(VOCAB, sources), TreeDrafter(VOCAB, sources)
    begun((native, reference), texts, salt=b"" if seed else None)
    num_moves = num_nodes = 0
    for step in range(25):
        max_nodes = rng.choice((0, 1, 6, 12))
        seconds = [1.0 + 0.01 * i for i in range(40)]
        prices = RowPrices(num, seconds, own=0.9, gap=0.2) if step % 2 else RowPrices.free(num, 40)
        outputs = random_outputs(rng, texts)
        frame = frame_of(texts, max_nodes=12)
        follower, follow_up = run(native, frame, outputs, prices, max_nodes)
        results = [text.commit(rows) for text, rows in zip(texts, outputs, strict=True)]
        reference.commit([committed for _, committed in results])
        trees, expected = reference.grow([Limit(i, max_nodes, MAX_DEPTH) for i in range(num)], prices)
        assert follower.trees() == (trees, expected)
        moves = [
            move for text, (verdict, _) in zip(texts, results, strict=True) for move in text.moves(verdict)
        ]
        for text, tree in zip(texts, trees, strict=True):
            text.tree = tree
        assert follow_up.numbers.tolist() == numbers_of([text.span for text in texts], moves)
        assert (follow_up.num_spans, follow_up.num_moves) == (num, len(moves))
        assert follow_up.num_rows == num + sum(map(len, trees))
        assert follow_up.moves() == moves
        num_moves, num_nodes = num_moves + len(moves), num_nodes + sum(map(len, trees))
    assert num_nodes > 40
    assert num_moves > 3


def ready(seed=0, **settings):
    rng = random.Random(seed)
    texts = [Text(0, rng, **settings), Text(1, rng)]
    native = NativeDrafter(VOCAB)
    begun([native], texts)
    return rng, texts, native


@pytest.mark.parametrize("case", ["pages", "unknown", "all ended"])
def test_where_the_loop_has_to_plan_nothing_changes(case):
    rng, texts, native = ready(stop_ids=(7, 9))
    outputs = random_outputs(rng, texts)
    if case == "pages":
        del texts[0].pages[len(texts[0].tokens) // PAGE :]
        texts[0].tokens = texts[0].tokens[: PAGE * len(texts[0].pages)]
    elif case == "unknown":
        native.forget(1, store=False)
    else:
        outputs[0][0, 0] = 9
        texts[1].max_len = len(texts[1].tokens) + 1
    before = native.memory()
    assert run(native, frame_of(texts, 8), outputs, RowPrices.free(2, 20), 8)[1] is None
    assert native.memory() == before


@pytest.mark.parametrize("case", ["stop", "length"])
def test_a_sequence_that_ends_has_no_rows_in_the_next_frame(case):
    rng, texts, native = ready(stop_ids=(7, 9))
    outputs = random_outputs(rng, texts)
    if case == "stop":
        outputs[0][0, 0] = 9
    else:
        texts[0].max_len = len(texts[0].tokens) + 1
    follower, follow_up = run(native, frame_of(texts, 8), outputs, RowPrices.free(2, 20), 8)
    (ended, tree), _ = follower.trees()
    texts[1].commit(outputs[1])
    texts[1].tree = tree
    assert len(ended) == 0
    assert len(tree) > 0
    assert follow_up.numbers.tolist() == numbers_of([texts[1].span])
    assert follow_up.pages.tolist() == texts[1].pages.tolist()


def test_a_sequence_that_reads_known_tokens_has_the_rows_it_was_given():
    rng, texts, native = ready()
    texts[0].reads = 5
    outputs = random_outputs(rng, texts)
    before = texts[0].span
    follower, follow_up = run(native, frame_of(texts, 8), outputs, RowPrices.free(1, 20), 8)
    (none, tree), _ = follower.trees()
    texts[1].commit(outputs[1])
    texts[1].tree = tree
    after = before._replace(start=before.start + 1, inputs=tuple(range(5)), given=8)
    assert len(none) == 0
    assert follow_up.numbers.tolist() == numbers_of([after, texts[1].span])
    assert follow_up.num_rows == 6 + len(tree)
    assert follow_up.sampled_rows() == list(range(5, 6 + len(tree)))


def test_guesses_after_a_stop_id_are_left_out():
    """The text repeats 1 2 3 4, and 3 ends it: what may follow 3 is not worth a row."""
    rng, texts, native = ready()
    text = texts[0]
    text.tokens, text.stop_ids = [1, 2, 3, 4] * 10 + [1], (3,)
    native.begin(0, list(text.tokens), b"")
    outputs = random_outputs(rng, texts)
    outputs[0][0, 0] = 2
    follower, _ = run(native, frame_of(texts, 12), outputs, RowPrices.free(2, 20), 12)
    (tree, _), _ = follower.trees()
    assert 3 in tree.tokens
    assert all(parent < 0 or tree.tokens[parent] != 3 for parent in tree.parents)


def test_a_follow_up_never_has_more_rows_than_a_frame():
    rng, texts, native = ready()
    for max_rows in (2, 3, 9):
        outputs = random_outputs(rng, texts)
        follower, follow_up = run(native, frame_of(texts, 12, max_rows), outputs, RowPrices.free(2, 24), 12)
        assert follow_up.num_rows <= max_rows
        for text, rows, tree in zip(texts, outputs, follower.trees()[0], strict=True):
            text.commit(rows)
            text.tree = tree


def test_without_candidates_a_follow_up_knows_the_tokens_alone():
    rng, texts, native = ready()
    reference, prices = TreeDrafter(VOCAB), RowPrices.free(2, 20)
    begun([reference], texts)
    for _ in range(5):
        outputs = random_outputs(rng, texts)
        follower, _ = run(native, frame_of(texts, 8), outputs, prices, 8, candidates=False)
        committed = [text.commit(rows)[1] for text, rows in zip(texts, outputs, strict=True)]
        reference.commit([Committed(one.seq_id, one.tokens) for one in committed])
        assert follower.trees() == reference.grow([Limit(i, 8, MAX_DEPTH) for i in range(2)], prices)
        for text, tree in zip(texts, follower.trees()[0], strict=True):
            text.tree = tree

"""Scheduler: drafts that are trees, one row per node; the accepted path's KV is moved where it belongs."""

import random
from collections.abc import Callable

import pytest
from fake_engine import PAGE, VOCAB, FakeEngine, make_limits, next_frame, next_token

from samewise.types import ROOT, Ask, Proposal


def engine_with_read_prompt(prompt_len: int, **limits: int) -> FakeEngine:
    """An engine with one sequence that has read its prompt and generated one token."""
    engine = FakeEngine(make_limits(**{"max_rows": 16} | limits))
    engine.add([1, 2, 3, 4, 0, 1][:prompt_len], 12)
    engine.step()
    engine.land()
    return engine


def right_tokens(ask: Ask, num: int) -> list[int]:
    prefix = list(ask.tokens)
    for _ in range(num):
        prefix.append(next_token(prefix))
    return prefix[len(ask.tokens) :]


def wrong_first(ask: Ask) -> Proposal:
    """A wrong chain of two nodes, then the right one of three."""
    a, b, c = right_tokens(ask, 3)
    wrong = (a + 1) % VOCAB
    return Proposal(ask.seq_id, (wrong, wrong, a, b, c), drafter="d", parents=(ROOT, 0, ROOT, 2, 3))


def random_tree(seed: int, num: int = 7) -> Callable[[Ask], Proposal]:
    """Trees with right and wrong nodes in any order."""
    pick = random.Random(seed)

    def propose(ask: Ask) -> Proposal:
        tokens: list[int] = []
        parents: list[int] = []
        paths = {ROOT: list(ask.tokens)}
        for node in range(pick.randint(1, num)):
            parent = pick.choice([ROOT, *range(node)])
            right = next_token(paths[parent])
            tokens.append(right if pick.random() < 0.7 else pick.randrange(VOCAB))
            parents.append(parent)
            paths[node] = [*paths[parent], tokens[-1]]
        return Proposal(ask.seq_id, tuple(tokens), drafter="d", parents=tuple(parents))

    return propose


@pytest.mark.parametrize("prompt_len", [3, 4, 6])
def test_the_accepted_path_is_committed_and_moved_to_its_place(prompt_len: int) -> None:
    engine = engine_with_read_prompt(prompt_len)
    (span,) = next_frame(engine, wrong_first)
    engine.check_frame([span])
    assert span.parents == (ROOT, 0, ROOT, 2, 3)
    (delta,) = engine.land()
    assert (len(delta.tokens), delta.accepted, delta.guessed) == (4, 3, 5)
    engine.drain()  # reading KV that is not that of its prefix is an error


def test_a_tree_that_is_a_chain_needs_no_parents() -> None:
    engine = engine_with_read_prompt(3)
    (span,) = next_frame(
        engine, lambda ask: Proposal(ask.seq_id, tuple(right_tokens(ask, 3)), parents=(ROOT, 0, 1))
    )
    assert span.parents == ()
    (delta,) = engine.land()
    assert delta.accepted == 3
    engine.drain()


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("how", ["lazy", "eager"])
def test_random_trees_give_the_models_own_tokens(seed: int, how: str) -> None:
    pick = random.Random(seed)
    engine = FakeEngine(
        make_limits(max_rows=pick.choice([4, 9, 30]), num_pages=pick.choice([9, 14, 40]), max_model_len=30)
    )
    for _ in range(4):
        engine.add([pick.randrange(VOCAB) for _ in range(pick.randint(1, 7))], pick.randint(1, 20))
    for _ in range(20):
        engine.step(random_tree(pick.random(), num=12), how)  # type: ignore[arg-type]
        if pick.random() < 0.1:
            engine.scheduler.preempt(pick.randrange(4)) if not engine.flight else None
    engine.drain(random_tree(seed), how)


def test_an_invalid_node_is_dropped_with_all_that_follows_it() -> None:
    engine = engine_with_read_prompt(3, vocab=VOCAB)
    (span,) = next_frame(
        engine,
        lambda ask: Proposal(ask.seq_id, (1, VOCAB, 2, -1, 3, 4, 2), parents=(ROOT, ROOT, 1, 0, 3, 0, 9)),
    )
    assert span.inputs[span.given :] == (1, 4)
    assert span.parents == ()
    engine.drain()


def test_a_tree_is_no_deeper_than_the_limits_allow() -> None:
    engine = engine_with_read_prompt(3, max_draft=3)
    (span,) = next_frame(
        engine, lambda ask: Proposal(ask.seq_id, (1, 1, 1, 1, 2), parents=(ROOT, 0, 1, 2, ROOT))
    )
    assert span.inputs[span.given :] == (1, 1, 1, 2)
    engine.drain()


def test_nodes_after_the_end_of_the_text_are_dropped() -> None:
    engine = engine_with_read_prompt(3)
    seq = engine.scheduler._running[0]
    object.__setattr__(seq.request.sampling, "stop_ids", frozenset({5}))
    (span,) = next_frame(engine, lambda ask: Proposal(ask.seq_id, (5, 1, 2), parents=(ROOT, 0, ROOT)))
    assert span.inputs[span.given :] == (5, 2)


def test_trees_use_only_free_pages() -> None:
    engine = FakeEngine(make_limits(num_pages=5, max_rows=16, max_model_len=12))
    engine.add([1, 2, 3], 8)
    engine.step()
    engine.land()
    (ask,) = engine.scheduler.asks(verified=True)
    assert ask.max_nodes <= (4 * PAGE) - len(ask.tokens)
    engine.scheduler.check()
    engine.drain(random_tree(1))


def test_siblings_of_one_token_count_once() -> None:
    engine = engine_with_read_prompt(3)
    (span,) = next_frame(
        engine,
        lambda ask: Proposal(
            ask.seq_id,
            (right_tokens(ask, 1)[0],) * 2 + tuple(right_tokens(ask, 2)[1:]),
            parents=(ROOT, ROOT, 1),
        ),
    )
    assert len(span.parents) == 3
    (delta,) = engine.land()
    assert delta.accepted == 1  # the first of equal siblings, which has no child
    engine.drain()

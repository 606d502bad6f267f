"""Laws 1 to 4 with draft trees: whichever path is accepted, and wherever it stands, no bit changes."""

from dataclasses import replace

import pytest
from law_helpers import (
    CASES,
    PAGE,
    Case,
    other_requests,
    random_prompt,
    run_alone,
    run_cases,
    run_one,
    run_reference,
    run_references,
    sampled,
)
from law_trees import (
    SHAPES,
    known_trees,
    random_shape,
    siblings_everywhere,
    wrong_chain_first,
    wrong_everywhere,
)

from samewise.testing import Bushy, preempting
from samewise.types import MAX_TREE_NODES, ROOT, Sampling

LONG = [replace(case, max_tokens=40) for case in CASES if case.prompt_logprobs is None]


@pytest.mark.parametrize("shape", SHAPES)
def test_output_is_the_same_whichever_path_is_accepted(setup, shape):
    cases = LONG[::3]
    expected = run_references(setup, cases)
    for run in (run_alone, run_cases):
        engine = setup.engine(known_trees(cases, expected, num=5, shape=shape))
        assert run(engine, cases) == expected
    drafter = engine.scheduler.counters.drafters["known"]
    assert (drafter.accepted > 0) == (shape is not wrong_everywhere)
    assert engine.scheduler.counters.rolled_back > 0


@pytest.mark.parametrize("length", range(PAGE - 6, PAGE + 3))
def test_a_tree_across_a_page_border_changes_nothing(basic, length):
    case = Case("border", random_prompt(length, 9), sampled(4), max_tokens=2 * PAGE)
    expected = run_reference(basic, case)
    engine = basic.engine(known_trees([case], [expected], num=7, shape=wrong_chain_first))
    assert run_one(engine, case) == expected
    assert engine.scheduler.counters.accepted > 2 * 7


@pytest.mark.parametrize("length", [252, 255, 256])
def test_a_tree_across_a_split_of_the_keys_changes_nothing(setup, length):
    """On CUDA attention splits the keys at multiples of 256."""
    case = Case("split", random_prompt(length, 2), max_tokens=14)
    expected = run_reference(setup, case)
    engine = setup.engine(known_trees([case], [expected], num=9, shape=siblings_everywhere))
    assert run_one(engine, case) == expected
    assert engine.scheduler.counters.accepted > 7


@pytest.mark.parametrize("shape", [siblings_everywhere, random_shape])
def test_a_stop_inside_a_tree_ends_the_text_there(basic, shape):
    case = Case("whole", random_prompt(11, 4), max_tokens=30)
    whole = run_reference(basic, case)
    stop = next(token for i, token in enumerate(whole.tokens) if i > 5 and token not in whole.tokens[:i])
    stopped = replace(case, sampling=Sampling(stop_ids=frozenset({stop})))
    expected = run_reference(basic, stopped)
    assert expected.tokens == whole.tokens[: whole.tokens.index(stop) + 1]
    engine = basic.engine(known_trees([case], [whole], num=8, shape=shape))
    assert run_one(engine, stopped) == expected


def test_moved_pages_are_canonical(basic):
    """They enter the prefix index and are read by later requests."""
    case = Case("first", random_prompt(20, 5), max_tokens=3 * PAGE)
    expected = run_reference(basic, case)
    engine = basic.engine(known_trees([case], [expected], num=6, shape=wrong_chain_first))
    run_one(engine, case)
    longer = Case("second", (*case.prompt, *expected.tokens), max_tokens=8)
    output = run_one(engine, longer)
    assert output.num_cached >= 4 * PAGE
    assert output == run_reference(basic, longer)


@pytest.mark.parametrize("num_pages", [6, 9, 12])
def test_trees_are_smaller_where_pages_run_out(basic, num_pages):
    cases = [Case(f"tight-{i}", random_prompt(9, i), sampled(i), max_tokens=50) for i in range(3)]
    expected = run_references(basic, cases)
    engine = basic.engine(known_trees(cases, expected, num=6, shape=siblings_everywhere), num_pages=num_pages)
    assert run_cases(engine, cases) == expected
    assert engine.scheduler.counters.accepted > 0


@pytest.mark.parametrize("shape", [siblings_everywhere, wrong_chain_first])
def test_trees_at_the_context_limit_change_nothing(basic, shape):
    """Nodes lie in slots beyond the last position a sequence can have."""
    case = Case("limit", random_prompt(9, 3), sampled(7), max_tokens=500)
    limits = {"max_model_len": 3 * PAGE}
    expected = run_one(basic.engine(**limits), case)
    assert len(case.prompt) + len(expected.tokens) == 3 * PAGE
    engine = basic.engine(known_trees([case], [expected], num=9, shape=shape), **limits)
    assert run_one(engine, case) == expected


def test_the_largest_trees_change_nothing(basic):
    """As many nodes as a tree may have, and more, which are dropped."""
    cases = LONG[:3]
    expected = run_references(basic, cases)

    def huge(right):
        nodes = siblings_everywhere(right)
        return nodes + [(i % 256, i % len(nodes)) for i in range(2 * MAX_TREE_NODES)]

    engine = basic.engine(known_trees(cases, expected, num=12, shape=huge))
    assert run_cases(engine, cases) == expected


@pytest.mark.parametrize("seed", range(3))
def test_preemption_and_aborts_beside_trees_change_nothing(basic, seed):
    cases = LONG[:6]
    expected = run_references(basic, cases)
    engine = basic.engine(lambda parts: Bushy(parts, scale=0.5, num=5, seed=seed), num_pages=60)
    others = [case.add(engine) for case in other_requests(3)]

    def abort_one(engine, step_index):
        if step_index % 7 == seed and others:
            engine.abort(others.pop())

    assert run_cases(engine, cases, step=lambda e: preempting(e, seed), after=abort_one) == expected


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [
        ((1,), (5,)),
        ((1,), (-7,)),
        ((1, 2), (1, ROOT)),
        ((10**9,), (ROOT,)),
        ((-4,), (ROOT,)),
        (tuple(range(200)), (ROOT,) * 200),
        (tuple(range(200)), tuple(range(-1, 199))),
    ],
)
def test_invalid_nodes_are_dropped(basic, tokens, parents):
    case = Case("invalid", random_prompt(9), max_tokens=12)
    expected = run_reference(basic, case)
    engine = basic.engine(
        known_trees([case], [expected], num=4, shape=lambda _: list(zip(tokens, parents, strict=True)))
    )
    assert run_one(engine, case) == expected

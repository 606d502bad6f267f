"""Law 4, dirt independence: no result reads what memory held before, or what drafts wrote there."""

import pytest
import torch
from law_helpers import (
    CASES,
    PAGE,
    Case,
    other_requests,
    random_prompt,
    run_cases,
    run_one,
    run_reference,
    sampled,
)
from law_proposers import PROPOSERS, adversary, jitter

from samewise.kv.prefix import extend_digests
from samewise.testing import preempting

WIDE = {"head_dim": 32}  # so that the page's own axis is the only one of size PAGE


# -- memory before its first write --------------------------------------------------------------------


def fill_store(engine, value):
    """Fill the KV store with a value, or with large random numbers and NaN."""
    if value == "random":
        generator = torch.Generator().manual_seed(0)
        for layer in engine.runner.store.layers:
            for tensor in layer:
                noise = torch.randn(tensor.shape, generator=generator) * 1e4
                tensor.copy_(noise.masked_fill_(noise > 2e4, float("nan")))
    else:
        engine.runner.store.fill(float(value))


@pytest.mark.parametrize("value", ["nan", "random"])
def test_memory_filled_with_nan_or_junk_changes_nothing(variant, value):
    engine = variant.engine(num_pages=80)
    fill_store(engine, value)
    assert run_cases(engine, CASES) == variant.references


@pytest.mark.parametrize("value", ["inf", "-inf", "1e30"])
def test_memory_filled_with_infinities_changes_nothing(setup, references, value):
    engine = setup.engine(num_pages=80)
    fill_store(engine, value)
    assert run_cases(engine, CASES) == references


def test_pages_that_held_rejected_drafts_change_nothing(setup, references):
    engine = setup.engine(adversary, num_pages=24, enable_prefix_caching=False)
    run_cases(engine, other_requests(8, max_tokens=20))
    assert run_cases(engine, CASES[::2]) == references[::2]
    engine.runner.store.fill(float("nan"))
    assert run_cases(engine, CASES[::2], step=lambda e: preempting(e, 2, 0.05)) == references[::2]


def test_the_trash_page_is_never_read(setup, references):
    def fill_trash_page(engine, _):
        for layer in engine.runner.store.layers:
            for tensor in layer:
                tensor[0].fill_(float("nan"))

    assert run_cases(setup.engine(jitter), CASES, after=fill_trash_page) == references


# -- KV below kv_len ----------------------------------------------------------------------------------


def kv_bits(engine, pages, length):
    """K and V of the first `length` positions, as integers: [2 × layers][positions, …]."""
    if engine.device.type == "cuda":
        torch.cuda.synchronize()
    bits = []
    for layer in engine.runner.store.layers:
        for tensor in layer:
            axis = tensor.shape.index(PAGE, 1)
            rows = tensor[list(pages)].movedim(axis, 1).flatten(0, 1)[:length].contiguous()
            bits.append(rows.view(torch.int32 if rows.element_size() == 4 else torch.int16).clone())
    return bits


class KVCheck:
    """After every step: no bit below the farthest kv_len reached so far has changed.

    A preempted sequence starts again at position 0 and must come to the same bits.
    """

    def __init__(self):
        self.farthest = {}  # request id: (tokens, bits)
        self.num_compared = 0

    def __call__(self, engine, _):
        engine.runner.store.flush_moves()  # as the next pass would, before it reads anything
        for request, seq in engine.scheduler._running.items():
            if seq.kv_len == 0:
                continue
            bits = kv_bits(engine, seq.pages[: -(-seq.kv_len // PAGE)], seq.kv_len)
            if request in self.farthest:
                _, before = self.farthest[request]
                for old, new in zip(before, bits, strict=True):
                    common = min(len(old), len(new))
                    assert torch.equal(old[:common], new[:common]), f"request {request} below {common}"
                    self.num_compared += common
            if request not in self.farthest or len(bits[0]) > len(self.farthest[request][0]):
                self.farthest[request] = (tuple(seq.tokens[: seq.kv_len]), bits)


@pytest.mark.parametrize("preempted", [False, True], ids=["calm", "preempted"])
def test_no_bit_below_kv_len_changes(variant, preempted):
    engine, check = variant.engine(num_pages=80, overrides=WIDE), KVCheck()
    step = (lambda e: preempting(e, 4, 0.1)) if preempted else type(engine).step
    run_cases(engine, [*CASES[::2], *other_requests(2)], step=step, after=check)
    assert check.num_compared > 0


def test_kv_of_a_token_prefix_has_the_same_bits_however_it_was_computed(setup):
    cases = [case for case in CASES if case.max_tokens >= 9][:5]
    alone = []
    for case in cases:
        engine = setup.engine(num_pages=80, enable_prefix_caching=False, overrides=WIDE)
        check = KVCheck()
        run_cases(engine, [case], after=check)
        (kv,) = check.farthest.values()
        alone.append(kv)
    engine, loaded = setup.engine(jitter, num_pages=80, overrides=WIDE), KVCheck()
    run_cases(engine, [*cases, *other_requests(4)], step=lambda e: preempting(e, 9, 0.05), after=loaded)
    num_generated = 0
    for i, (case, (tokens, bits)) in enumerate(zip(cases, alone, strict=True)):
        loaded_tokens, loaded_bits = loaded.farthest[i]
        common = min(len(tokens), len(loaded_tokens))
        num_generated += max(0, common - len(case.prompt))
        assert tokens[:common] == loaded_tokens[:common]
        for a, b in zip(bits, loaded_bits, strict=True):
            assert torch.equal(a[:common], b[:common]), case.name
    assert num_generated > 20  # answers were compared, not prompts alone


# -- the prefix index ---------------------------------------------------------------------------------


@pytest.mark.parametrize("proposer", ["none", "jitter"])
def test_unverified_kv_never_enters_the_prefix_index(setup, proposer):
    case = Case("unverified", random_prompt(20, 3), sampled(1), 40, verify=False)
    engine = setup.engine(PROPOSERS[proposer])
    output = run_one(engine, case)
    assert len(output.tokens) == 40
    # The first token comes from the prompt's frame and, where frames are chained, the second one too.
    assert engine.scheduler.counters.unverified_tokens in (38, 39)
    assert engine.scheduler.index.num_indexed == len(case.prompt) // PAGE
    next_turn = Case("next turn", (*case.prompt, *output.tokens, 1), sampled(2))
    output = run_one(engine, next_turn)
    assert output.num_cached == 16
    assert output == run_reference(setup, next_turn)


def test_the_prompt_of_an_unverified_request_is_canonical_and_shared(setup):
    prompt = random_prompt(50, 12)
    engine = setup.engine()
    run_one(engine, Case("unverified", prompt, verify=False))
    case = Case("verified", prompt, sampled(1))
    output = run_one(engine, case)
    assert output.num_cached == 48
    assert output == run_reference(setup, case)


def test_preempted_unverified_requests_leave_only_canonical_pages(setup):
    """After preemption the answer is read in frames, so its KV is canonical; tokens that follow are not."""
    engine = setup.engine(jitter, num_pages=14)
    cases = [Case(f"unverified-{n}", random_prompt(18, n), sampled(n), 36, verify=False) for n in range(4)]
    outputs = run_cases(engine, cases, step=lambda e: preempting(e, 6, 0.1))
    assert engine.scheduler.counters.preempted > 0
    for case, output in zip(cases, outputs, strict=True):
        next_turn = Case("next turn", (*case.prompt, *output.tokens, 1), sampled(2))
        assert run_one(engine, next_turn) == run_reference(setup, next_turn)


def test_rejected_drafts_never_enter_the_prefix_index(setup):
    """After a run full of wrong drafts each indexed page holds the bits of an engine without proposer."""
    engine = setup.engine(adversary, num_pages=80, overrides=WIDE)
    outputs = run_cases(engine, CASES)
    prefixes: dict[bytes, tuple[int, ...]] = {}
    for case, output in zip(CASES, outputs, strict=True):
        tokens, digests = [*case.prompt, *output.tokens], []
        extend_digests(digests, tokens, b"", PAGE, len(tokens) // PAGE)
        prefixes |= {digest: tuple(tokens[: (i + 1) * PAGE]) for i, digest in enumerate(digests)}
    index = engine.scheduler.index
    assert set(index._page_of) <= set(prefixes)
    plain = setup.engine(num_pages=80, overrides=WIDE)
    run_cases(plain, [Case("read", (*tokens, 1), max_tokens=1) for tokens in prefixes.values()])
    for digest, page in index._page_of.items():
        after_drafts = kv_bits(engine, [page], PAGE)
        without_drafts = kv_bits(plain, [plain.scheduler.index._page_of[digest]], PAGE)
        assert all(torch.equal(a, b) for a, b in zip(after_drafts, without_drafts, strict=True))

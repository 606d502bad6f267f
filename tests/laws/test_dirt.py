"""Law 4, dirt independence: what lies in memory before, and what drafts write there, cannot be seen."""

import pytest
import torch
from lawbook import CASES, PAGE, PROPOSERS, Case, adversary, company, jitter, play, reference, text, warm

from samewise.kv.prefix import chain
from samewise.testing import preempting

WIDE = {"head_dim": 32}  # so that the page's own axis is the only one of sixteen


# ---- memory nobody has written to


def _junk(engine, value):
    if value == "random":
        generator = torch.Generator().manual_seed(0)
        for layer in engine.runner.store.layers:
            for tensor in layer:
                noise = torch.randn(tensor.shape, generator=generator) * 1e4
                tensor.copy_(noise.masked_fill_(noise > 2e4, float("nan")))
    else:
        engine.runner.store.fill(float(value))


@pytest.mark.parametrize("value", ["nan", "random"])
def test_memory_may_hold_anything(trial, value):
    engine = trial.engine(num_pages=80)
    _junk(engine, value)
    assert play(engine, CASES) == trial.truth


@pytest.mark.parametrize("value", ["inf", "-inf", "1e30"])
def test_memory_may_hold_anything_else(setup, truth, value):
    engine = setup.engine(num_pages=80)
    _junk(engine, value)
    assert play(engine, CASES) == truth


def test_pages_that_others_soiled(setup, truth):
    """Every page was somebody else's, with drafts that were wrong; and then all of it is NaN."""
    engine = setup.engine(adversary, num_pages=24, enable_prefix_caching=False)
    play(engine, company(8, most=20))
    assert play(engine, CASES[::2]) == truth[::2]
    engine.runner.store.fill(float("nan"))
    assert play(engine, CASES[::2], step=lambda e: preempting(e, 2, 0.05)) == truth[::2]


def test_the_trash_page_is_never_read(setup, truth):
    engine = setup.engine(jitter)

    def soil(engine, _):
        for layer in engine.runner.store.layers:
            for tensor in layer:
                tensor[0].fill_(float("nan"))

    assert play(engine, CASES, after=soil) == truth


# ---- KV below kv_len


def kv_bits(engine, pages, length):
    """K and V of the first `length` positions, as integers: [2 × layers][positions, …]."""
    if engine.device.type == "cuda":
        torch.cuda.synchronize()
    found = []
    for layer in engine.runner.store.layers:
        for tensor in layer:
            axis = tensor.shape.index(PAGE, 1)
            rows = tensor[list(pages)].movedim(axis, 1).flatten(0, 1)[:length].contiguous()
            found.append(rows.view(torch.int32 if rows.element_size() == 4 else torch.int16).clone())
    return found


class Watch:
    """After every step: no bit below the farthest kv_len that was reached may have changed.

    A preempted sequence starts again from nothing, and must come to the same bits.
    """

    def __init__(self):
        self.seen = {}  # request id: (tokens, bits)
        self.compared = 0

    def __call__(self, engine, _):
        for request, seq in engine.scheduler._running.items():
            if seq.kv_len == 0:
                continue
            bits = kv_bits(engine, seq.pages[: -(-seq.kv_len // PAGE)], seq.kv_len)
            if request in self.seen:
                _, before = self.seen[request]
                for old, new in zip(before, bits, strict=True):
                    both = min(len(old), len(new))
                    assert torch.equal(old[:both], new[:both]), f"request {request} below {both}"
                    self.compared += both
            if request not in self.seen or len(bits[0]) > len(self.seen[request][0]):
                self.seen[request] = (tuple(seq.tokens[: seq.kv_len]), bits)


@pytest.mark.parametrize("preempted", [False, True], ids=["calm", "preempted"])
def test_nothing_below_kv_len_ever_changes(trial, preempted):
    engine, watch = trial.engine(num_pages=80, overrides=WIDE), Watch()
    step = (lambda e: preempting(e, 4, 0.1)) if preempted else type(engine).step
    play(engine, [*CASES[::2], *company(2)], step=step, after=watch)
    assert watch.compared > 0


def test_kv_is_canonical(setup):
    """For a given token prefix its bits are unique, whatever produced it."""
    cases = [c for c in CASES if c.most >= 9][:5]
    alone, busy = Watch(), Watch()
    for case in cases:
        engine = setup.engine(num_pages=80, enable_prefix_caching=False, overrides=WIDE)
        one = Watch()
        play(engine, [case], after=one)
        alone.seen[case.name] = one.seen[0]
    engine = setup.engine(jitter, num_pages=80, overrides=WIDE)
    play(engine, [*cases, *company(4)], step=lambda e: preempting(e, 9, 0.05), after=busy)
    answered = 0
    for i, case in enumerate(cases):
        (tokens, bits), (others, other_bits) = alone.seen[case.name], busy.seen[i]
        both = min(len(tokens), len(others))
        answered += max(0, both - len(case.prompt))
        assert tokens[:both] == others[:both]
        for a, b in zip(bits, other_bits, strict=True):
            assert torch.equal(a[:both], b[:both]), case.name
    assert answered > 20  # not of prompts alone


# ---- what may be found by others


@pytest.mark.parametrize("proposer", ["none", "jitter"])
def test_unverified_kv_never_enters_the_prefix_index(setup, proposer):
    case = Case("open", text(20, 3), warm(1), 40, verify=False)
    engine = setup.engine(PROPOSERS[proposer])
    (heard,) = play(engine, [case])
    assert len(heard.tokens) == 40
    # The first comes from the prompt's frame, and where frames are chained the next one too.
    assert engine.scheduler.counters.unverified_tokens in (38, 39)
    assert engine.scheduler.index.num_indexed == len(case.prompt) // PAGE
    turn = Case("next", (*case.prompt, *heard.tokens, 1), warm(2))
    (after,) = play(engine, [turn])
    assert after.num_cached == 16
    assert [after] == reference(setup, [turn])


def test_an_unverified_prompt_is_canonical_and_shared(setup):
    prompt = text(50, 12)
    engine = setup.engine()
    play(engine, [Case("open", prompt, verify=False)])
    case = Case("closed", prompt, warm(1))
    (heard,) = play(engine, [case])
    assert heard.num_cached == 48
    assert [heard] == reference(setup, [case])


def test_preempted_unverified_requests_leave_only_canonical_pages(setup):
    """Read again in frames, an unverified answer's KV is canonical; what follows it is not."""
    engine = setup.engine(jitter, num_pages=14)
    opens = [Case(f"open-{n}", text(18, n), warm(n), 36, verify=False) for n in range(4)]
    heard = play(engine, opens, step=lambda e: preempting(e, 6, 0.1))
    assert engine.scheduler.counters.preempted > 0
    for case, one in zip(opens, heard, strict=True):
        turn = Case("next", (*case.prompt, *one.tokens, 1), warm(2))
        assert play(engine, [turn]) == reference(setup, [turn])


def test_rejected_drafts_never_enter_the_prefix_index(setup, truth):
    """After a run full of wrong drafts, every page in the index holds the bits a plain engine gives."""
    engine = setup.engine(adversary, num_pages=80, overrides=WIDE)
    heard = play(engine, CASES)
    prefixes: dict[bytes, tuple[int, ...]] = {}
    for case, one in zip(CASES, heard, strict=True):
        tokens, digests = [*case.prompt, *one.tokens], []
        chain(digests, tokens, b"", PAGE, len(tokens) // PAGE)
        prefixes |= {digest: tuple(tokens[: (i + 1) * PAGE]) for i, digest in enumerate(digests)}
    index = engine.scheduler.index
    assert set(index._page_of) <= set(prefixes)
    plain = setup.engine(num_pages=80, overrides=WIDE)
    play(plain, [Case("read", (*tokens, 1), most=1) for tokens in prefixes.values()])
    for digest, page in index._page_of.items():
        theirs = kv_bits(engine, [page], PAGE)
        ours = kv_bits(plain, [plain.scheduler.index._page_of[digest]], PAGE)
        assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))

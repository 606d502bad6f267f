"""`skip`: views of layers, rehearsal, phases, memory."""

import json
import logging
import random

import pytest
import torch

from samewise import user_cache
from samewise.bench import timeline
from samewise.config import EngineConfig
from samewise.draft.build import MAKERS
from samewise.draft.decode import Decode
from samewise.draft.skip.skip import Skip
from samewise.engine import Engine
from samewise.errors import BadParameter
from samewise.execute.pack import pack_frame
from samewise.model import fused_layer as layers
from samewise.testing import FAMILIES, planted, planted_best, submit, tiny, tiny_engine, two_topics
from samewise.types import LayerSet, Sampling

LAYERS = 12
BEST = planted_best(LAYERS)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SAMEWISE_CACHE", str(tmp_path))


@pytest.fixture(autouse=True)
def _layers_tell(monkeypatch):
    """A layer that is one call tells those who listen to its parts."""
    call = layers.FusedForward.__call__

    def told(self, *args, **named):
        out = call(self, *args, **named)
        for part in (self._attention, self._mlp):
            for hook in part._forward_hooks.values() if part is not None else ():
                hook(part, (), out)
        return out

    monkeypatch.setattr(layers.FusedForward, "__call__", told)


class Worked:
    """A clock that only work moves: every sublayer takes its time, and so does every row it is given."""

    def __init__(self):
        self.now = 1.0

    def __call__(self):
        return self.now

    def watch(self, engine):
        for layer in engine.runner.model.model.layers:
            layer.self_attn.register_forward_hook(self._takes(0.35e-3))
            layer.mlp.register_forward_hook(self._takes(0.65e-3))

    def _takes(self, seconds):
        def hook(module, args, kwargs_or_output, *_):
            out = kwargs_or_output[0] if isinstance(kwargs_or_output, tuple) else kwargs_or_output
            self.now += seconds * (1 + 0.05 * out.shape[1])

        return hook


def engine_of(loaded=None, *, make=None, **settings):
    settings = {"model": "planted", "device": "cpu", "kv_memory": 2**24, "proposer": "skip",
                "search_share": 0.5, "search_every": 8} | settings  # fmt: skip
    clock = Worked()
    loaded = loaded or planted(LAYERS, 64)
    engine = Engine(loaded, EngineConfig.of(**settings), make_proposer=make, clock=clock)
    clock.watch(engine)
    return engine


def talk(engine, num=1, most=120, seed=0, temperature=0.0):
    rng = random.Random(seed)
    said = {}
    for i in range(num):
        prompt = [rng.randrange(256) for _ in range(10)]
        said[submit(engine, prompt, Sampling(temperature=temperature, seed=i), max_tokens=most)] = []
    while not engine.idle:
        for delta in engine.step():
            said[delta.request_id] += delta.tokens
    engine.check()
    return list(said.values())


# ---- views


@pytest.mark.parametrize("family", FAMILIES)
def test_a_view_is_the_model_whose_sublayer_adds_nothing(family):
    engine = tiny_engine(family, proposer="none", overrides={"num_hidden_layers": 4})
    runner = engine.runner
    skipped = LayerSet(frozenset({1, 2}), frozenset({2, 3}))
    path = runner.skipping(runner.views(), skipped)
    batch = pack_frame([], runner.staging(4))
    batch.tokens.copy_(torch.tensor([[5, 9, 77, 200]]))
    whole, found = runner.eager(batch).clone(), runner.look(batch, path).clone()
    layers = runner.model.model.layers
    with torch.no_grad():
        for i in skipped.attention:
            layers[i].self_attn.o_proj.weight.zero_()
            layers[i].self_attn.o_proj.packed = None
        for i in skipped.mlp:
            layers[i].mlp.down_proj.weight.zero_()
            layers[i].mlp.down_proj.packed = None
    muted = runner.eager(batch)
    torch.testing.assert_close(found, muted)
    assert not torch.equal(whole, muted)


def test_a_layer_without_both_is_not_called_and_nothing_is_left_changed():
    engine = tiny_engine(proposer="none", overrides={"num_hidden_layers": 4})
    runner = engine.runner
    before = runner.eager(pack_frame([], runner.staging(2))).clone()
    called = []
    handles = [m.register_forward_hook(lambda m, *_: called.append(m)) for m in runner.model.model.layers]
    path = runner.skipping(runner.views(), LayerSet(frozenset({1}), frozenset({1, 2})))
    called.clear()
    runner.look(pack_frame([], runner.staging(2)), path)
    assert runner.model.model.layers[1] not in called
    for handle in handles:
        handle.remove()
    assert torch.equal(runner.eager(pack_frame([], runner.staging(2))), before)


def test_norms_that_feed_only_what_is_left_out_are_left_out_too():
    engine = tiny_engine(proposer="none", overrides={"num_hidden_layers": 3})
    views = engine.runner.views()
    assert views._feeders == (["input_layernorm"], ["post_attention_layernorm"])


def test_layers_that_are_built_otherwise_are_refused_by_name():
    loaded = tiny(num_hidden_layers=4)
    loaded.model.model.layers[2].extra = torch.nn.Linear(64, 64)
    with pytest.raises(BadParameter, match=r"skip.*llama.*mlp, extra"):
        Engine(loaded, EngineConfig(model="odd", device="cpu", kv_memory=2**22, proposer="skip"))
    engine = Engine(loaded, EngineConfig(model="odd", device="cpu", kv_memory=2**22, proposer="auto"))
    assert "skip" not in engine.stats()["auto"]["drafters"]


# ---- finding the set


@pytest.mark.parametrize(("live", "temperature"), [(1, 0.0), (3, 0.0), (2, 0.7)])
def test_the_planted_set_is_found_and_used(live, temperature):
    engine = engine_of()
    talk(engine, live, 160, temperature=temperature)
    report = engine.stats()["skip"]
    found = LayerSet(frozenset(report["set"]["attention"]), frozenset(report["set"]["mlp"]))
    assert not found.attention - BEST.attention, "an essential sublayer was left out"
    assert not found.mlp - BEST.mlp
    assert len(found) > 0.7 * len(BEST)
    assert report["matchness"] > 0.9
    assert report["first_guess_acceptance"] > 0.8
    assert engine.stats()["tokens_per_frame"] > 1.5 * live


def test_phases_come_in_order_and_are_told():
    engine = engine_of(search_rounds=12)
    talk(engine, 1, 400)
    events = engine.stats()["skip"]["timeline"]
    kinds = [event["event"] for event in events]
    assert kinds[0] == "accumulate"
    assert kinds[1] == "optimise"
    assert kinds[-1] == "accelerate"
    assert [event["tokens"] for event in events] == sorted(event["tokens"] for event in events)
    assert events[-1]["set"]["mlp"]
    assert events[-1]["score"] > 0


def test_the_search_keeps_to_its_share_of_the_time():
    for share in (0.05, 0.3):
        engine = engine_of(search_share=share, search_rounds=1000, search_every=1)
        talk(engine, 1, 200)
        search = engine.stats()["skip"]["search"]
        assert search["rounds"] > 0
        assert search["share"] <= share * 1.2


def test_a_change_of_topic_opens_the_search_again():
    """A set that was good stops being so: first guesses fail, the search reopens and recovers."""
    engine = engine_of(search_rounds=8)
    for seed in range(4):
        talk(engine, 1, 300, seed=seed)
    skip = engine.proposer
    assert isinstance(skip, Skip)
    assert not skip._search.open
    essential = LayerSet(frozenset(range(1, LAYERS - 1)), frozenset(range(1, LAYERS - 1)))
    assert skip._norm is not None
    skip._search.best.skipped = essential  # what the last topic could do without, this one cannot
    skip._path = skip._rehearsal.path(essential)
    talk(engine, 1, 450, seed=5)
    kinds = [event["event"] for event in engine.stats()["skip"]["timeline"]]
    assert kinds[-1] == "accelerate"
    assert "optimise" in kinds[kinds.index("accelerate") :]
    assert engine.stats()["skip"]["matchness"] > 0.9
    assert not skip._search.best.skipped.mlp - BEST.mlp


EVERYTHING = LayerSet(frozenset(range(LAYERS)), frozenset(range(LAYERS)))  # where all of it matters


def test_where_nothing_was_found_it_looks_again_and_ever_more_rarely():
    engine = engine_of(planted(LAYERS, 64, keep=EVERYTHING), search_rounds=6)
    engine.proposer._pause = 100
    for seed in range(4):
        talk(engine, 1, 400, seed=seed)
    report = engine.stats()["skip"]
    assert report["set"]["skipped"] == 0
    closed = [e["tokens"] for e in report["timeline"] if e["event"] == "accelerate"]
    after = [min(e["tokens"] for e in report["timeline"] if e["tokens"] > at) for at in closed[:3]]
    waited = [b - a for a, b in zip(closed, after, strict=False)]
    assert [round(one, -2) for one in waited] == [100, 200, 400]


def test_what_is_found_later_is_used():
    """At first nothing could be left out; then the topic is another."""
    engine = engine_of(search_rounds=6)
    skip = engine.proposer
    skip._search.best, skip._search.open, skip._again = type(skip._search.best)(LayerSet()), False, 200
    talk(engine, 1, 150)
    assert not skip.ready
    talk(engine, 1, 300, seed=1)
    assert len(skip._search.best.skipped) > 0.7 * len(BEST)
    assert engine.scheduler.counters.accepted > 0


def test_without_a_set_nobody_asks_but_for_steps_of_the_search():
    engine = engine_of(planted(LAYERS, 64, keep=EVERYTHING), search_share=0.02)
    calls, propose = [], engine.proposer.propose
    engine.proposer.propose = lambda asks: calls.append(len(asks)) or propose(asks)
    talk(engine, 1, 600)
    rounds = engine.stats()["skip"]["search"]["rounds"]
    assert 0 < rounds <= len(calls) < 60


def test_luck_does_not_open_the_search_again():
    """First guesses that are right in seven of ten cases are so by turns."""
    engine = engine_of(search_rounds=6)
    talk(engine, 1, 300)
    skip, rng = engine.proposer, random.Random(0)
    skip._settle()
    for _ in range(2000):
        skip._first.observe(1, int(rng.random() < 0.7))
        skip.observe([])
    assert not skip._search.open
    for _ in range(100):
        skip._first.observe(1, int(rng.random() < 0.05))
        skip.observe([])
    assert skip._search.open


def feed(skip, rights):
    """First guesses that were right or not; what the timeline gained by them."""
    before = len(skip._events)
    for right in rights:
        skip._first.observe(1, int(right))
        skip.observe([])
    return [event.event for event in skip._events[before:]]


def test_a_broken_promise_drops_the_set_also_while_the_search_is_open_and_it_is_not_recalled():
    loaded, calls = planted(LAYERS, 64), []
    talk(engine_of(loaded, search_rounds=6), 1, 300)
    engine = engine_of(loaded, search_rounds=6)
    skip = engine.proposer
    recall = skip._store.load
    skip._store.load = lambda: calls.append(1) or recall()
    talk(engine, 1, 300)
    skip._settle()
    skip._search.open = True
    assert feed(skip, [False] * 60) == ["optimise"]
    assert not skip.ready
    assert skip._search.round == 0
    talk(engine, 1, 300, seed=9)
    assert len(skip._search.best.skipped) > 0.7 * len(BEST)
    assert calls == [1]


def test_a_fall_that_is_no_collapse_keeps_the_set_in_use():
    engine = engine_of(search_rounds=6)
    talk(engine, 1, 300)
    skip = engine.proposer
    skip._settle()
    kept = skip._search.best.skipped
    assert feed(skip, [True] * 24 + [i % 3 > 0 for i in range(200)]) == ["optimise"]
    assert skip._search.open
    assert skip._search.best.skipped == kept


def test_a_set_that_is_scored_as_broken_is_dropped_and_not_kept_for_others():
    engine = engine_of(search_rounds=64)
    talk(engine, 1, 300)
    skip = engine.proposer
    known = skip._store.load()
    skip._search.open, skip._scored_at, skip._saved = True, 0, 1e9
    told = skip._told
    skip._told = lambda pieces, skipped: told(pieces, skipped)._replace(right=0)
    talk(engine, 1, 60, seed=5)
    assert not skip.ready
    assert skip._store.load() == known


def test_sets_that_never_hold_are_given_up_for_a_while():
    engine = engine_of(search_rounds=6)
    talk(engine, 1, 300)
    skip, best = engine.proposer, engine.proposer._search.best
    for _ in range(3):
        skip._search.best = best
        skip._use(best.skipped)
        feed(skip, [False] * 30)
    assert not skip._search.open
    assert skip.quiet
    assert skip._again > engine.scheduler.counters.output_tokens


def test_two_topics_and_back():
    engine = engine_of(two_topics(), search_rounds=10)
    left_out = []
    for seed, (low, high) in enumerate(((0, 160), (160, 320), (0, 160))):
        sampling = Sampling(temperature=0.7, seed=seed, allowed_token_ids=tuple(range(low, high)))
        rng = random.Random(seed)
        submit(engine, [rng.randrange(low, high) for _ in range(16)], sampling, max_tokens=380)
        while not engine.idle:
            engine.step()
        mlps = engine.stats()["skip"]["set"]["mlp"]
        left_out.append((3 in mlps, 8 in mlps))
    assert left_out == [(False, True), (True, False), (False, True)]
    kinds = [event["event"] for event in engine.stats()["skip"]["timeline"]]
    assert kinds.count("accelerate") == 3


def test_the_timeline_is_recorded_and_drawn(tmp_path):
    rng = random.Random(1)
    asked = {name: [[rng.randrange(256) for _ in range(10)] for _ in range(2)] for name in ("one", "two")}
    line = timeline.record(engine_of(), asked, 1, 120)
    assert [topic for _, topic in line.topics] == ["one", "two"]
    assert [point.tokens for point in line.points] == sorted(point.tokens for point in line.points)
    assert {event["event"] for event in line.events} >= {"accumulate", "optimise"}
    assert any(point.acceptance for point in line.points)
    timeline.plot(line, tmp_path / "line.png", "planted", LAYERS)
    assert (tmp_path / "line.png").stat().st_size > 10_000
    assert json.loads(json.dumps(line.as_json()))["events"] == line.events


def test_the_timeline_counts_the_tokens_that_became_public():
    engine = engine_of(make=settled)
    talk(engine, 3, 20)  # drafts are cut where an answer ends
    engine.proposer._note("accelerate")
    assert engine.stats()["skip"]["timeline"][-1]["tokens"] == engine.scheduler.counters.output_tokens == 60


def test_recent_answers_are_rehearsed_when_live_ones_are_too_short():
    engine = engine_of(search_every=1)
    for seed in range(20):
        talk(engine, 1, 40, seed=seed)
    skip = engine.proposer
    assert isinstance(skip, Skip)
    assert skip._rehearsal._recent
    assert skip._search.round > 0  # 40 tokens alone are not enough, with a remembered answer they are


def test_unsure_guesses_offer_alternatives_where_rows_are_free():
    """FrameCosts of one size: padding is free, so branches fill it."""
    engine = engine_of(planted(LAYERS, 64, faint=0.05), linear="torch", frame_rows=64, max_model_len=256)
    talk(engine, 1, 200)
    assert engine.stats()["skip"]["branches"] > 5


def test_and_none_where_every_row_costs():
    engine = engine_of(planted(LAYERS, 64, faint=0.05), max_model_len=256)
    talk(engine, 4, 100)
    tally = engine.scheduler.counters.drafters["skip"]
    assert engine.stats()["skip"]["branches"] < 0.2 * tally.drafts


# ---- how far


def pace_of(engine, live, most=48):
    """On its clock, once it has seen some text."""
    talk(engine, live, most)
    began = engine._clock.now
    tokens = sum(len(said) for said in talk(engine, live, most, seed=3))
    return tokens / (engine._clock.now - began)


def settled(parts):
    made = MAKERS["skip"](parts)
    made.settle(BEST, 0.98)
    return made


@pytest.mark.parametrize("live", [1, 8])
def test_drafts_go_as_far_as_pays_for_every_number_of_sequences(live):
    """With a set that is known, no fixed length of drafts would be clearly faster."""
    loaded = planted(LAYERS, 64)

    def fixed(parts):
        path = parts.runner.skipping(parts.runner.views(), BEST)
        return Decode(parts.runner, parts.sampler, path=path)

    lengths = {1: (8, 15), 8: (3, 5, 7, 15)}[live]
    paces = [pace_of(engine_of(loaded, make=fixed, draft_tokens=num), live) for num in lengths]
    assert pace_of(engine_of(loaded, make=settled), live) > 0.95 * max(paces)


def test_a_set_it_found_is_as_good_as_one_it_was_given():
    loaded = planted(LAYERS, 64)
    engine, given = engine_of(loaded, search_rounds=8), engine_of(loaded, make=settled)
    talk(engine, 8, 64)
    assert engine.proposer._search.best.skipped == BEST
    assert not engine.proposer._search.open
    assert pace_of(engine, 8) > 0.95 * pace_of(given, 8)


def test_passes_that_drafted_are_what_a_pass_costs():
    engine = engine_of(make=settled)
    talk(engine, 2, 40)
    pricing = engine.proposer._pricing
    left = (2 + 1) * 0.35e-3 + (2 + 2) * 0.65e-3  # the first and the last layer, and what was planted
    assert pricing.seconds(BEST, 2) == pytest.approx(left * 1.1, rel=0.01)


# ---- memory


def test_a_found_set_is_kept_for_the_next_process_and_scored_before_it_is_trusted():
    loaded = planted(LAYERS, 64)
    engine = engine_of(loaded, search_rounds=6)
    talk(engine, 1, 300)
    found = engine.stats()["skip"]["set"]
    again = engine_of(loaded, search_rounds=6)
    assert again.stats()["skip"]["set"]["skipped"] == 0
    talk(again, 1, 90)
    first = next(e for e in again.stats()["skip"]["timeline"][1:])
    assert first["set"]["mlp"] == found["mlp"]
    other = engine_of(loaded, workload="another")
    assert other.proposer._store.load() is None


@pytest.mark.parametrize(
    "junk",
    ['"soup"', "{", '{"key": 3}', '{"attention": "abc", "mlp": [1]}', '{"attention": [77], "mlp": []}'],
)
def test_a_damaged_memory_is_ignored_with_a_warning_and_rewritten(junk, caplog):
    loaded = planted(LAYERS, 64)
    engine = engine_of(loaded, search_rounds=6)
    skip = engine.proposer
    skip._store.save(LayerSet(mlp=frozenset({1})), 0.5)
    (path,) = (user_cache.cache_dir() / "facts" / "layersets").glob("*.json")
    key = skip._store._key
    if junk.startswith('{"a'):
        path.write_text(json.dumps({"key": key, "value": json.loads(junk)}))
    else:
        path.write_text(junk)
    with caplog.at_level(logging.WARNING, logger="samewise"):
        talk(engine, 1, 300)
    assert not skip._search.open
    assert "ignoring" in caplog.text
    assert skip._store.load()[0] == skip._search.best.skipped


def test_new_weights_make_it_prove_its_set_again():
    engine = engine_of(search_rounds=6)
    talk(engine, 1, 300)
    assert not engine.proposer._search.open
    engine.update_weights({"model.norm.weight": torch.ones(64)})
    assert engine.proposer._search.open
    talk(engine, 1, 200)


# ---- auto


def test_auto_uses_it_where_it_pays():
    engine = engine_of(proposer="auto")
    talk(engine, 1, 400)
    assert engine.stats()["auto"]["decisions"]["skip"] > 20
    assert engine.scheduler.counters.drafters["skip"].accepted > 100


def test_auto_leaves_it_off_where_it_does_not():
    engine = engine_of(planted(LAYERS, 64, keep=EVERYTHING), proposer="auto", search_share=0.02)
    plain = engine_of(planted(LAYERS, 64, keep=EVERYTHING), proposer="none")
    assert talk(engine, 1, 600) == talk(plain, 1, 600)
    guessed = engine.scheduler.counters.drafters.get("skip")
    assert guessed is None or guessed.guessed < 60
    assert engine._clock.now < 1.05 * plain._clock.now


def test_it_writes_no_page_but_its_own_and_scratch():
    engine = engine_of(search_every=1, search_share=1.0)
    rng = random.Random(1)
    request = submit(engine, [rng.randrange(256) for _ in range(20)], Sampling(), max_tokens=60)
    store, canon = engine.runner.store, {}
    while not engine.idle:
        seq = engine.scheduler._running.get(request)
        if seq is not None:
            for page in range(seq.kv_len // 16):
                bits = [layer.k[seq.pages[page]].clone() for layer in store.layers]
                known = canon.setdefault(page, bits)
                assert all(torch.equal(a, b) for a, b in zip(bits, known, strict=True))
        engine.step()
    assert engine.stats()["skip"]["search"]["rounds"] > 3


def test_a_model_with_no_layer_to_spare():
    engine = tiny_engine(proposer="skip", overrides={"num_hidden_layers": 2})
    talk(engine, 1, 40)
    assert engine.stats()["skip"]["set"]["skipped"] == 0
    assert engine.scheduler.counters.guessed == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("search_share", 0), ("search_share", 1.5), ("search_share", "much"), ("search_every", 0),
     ("search_rounds", -1), ("search_window", 8), ("workload", 3)],
)  # fmt: skip
def test_settings_are_checked(name, value):
    with pytest.raises(BadParameter, match=name):
        EngineConfig.of(**{name: value})

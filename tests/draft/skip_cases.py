"""What tests of `skip` share: a planted model whose best layer set is known, under a simulated clock."""

import random

from samewise.config import EngineConfig
from samewise.draft.build import make_skip, maker_of
from samewise.draft.tuning import SearchTuning, Tuning
from samewise.engine import Engine
from samewise.testing import planted, planted_best, submit
from samewise.types import LayerSet, Sampling

LAYERS = 12
BEST = planted_best(LAYERS)
EVERY_SUBLAYER = LayerSet(frozenset(range(LAYERS)), frozenset(range(LAYERS)))


class WorkClock:
    """Moves only with work: each sublayer takes a fixed time, and 5 % more for each row."""

    def __init__(self):
        self.now = 1.0

    def __call__(self):
        return self.now

    def watch(self, runner):
        for layer in runner.model.model.layers:
            layer.self_attn.register_forward_hook(self._hook(0.35e-3))
            layer.mlp.register_forward_hook(self._hook(0.65e-3))

    def _hook(self, seconds):
        def hook(module, args, kwargs_or_output, *_):
            out = kwargs_or_output[0] if isinstance(kwargs_or_output, tuple) else kwargs_or_output
            self.now += seconds * (1 + 0.05 * out.shape[1])

        return hook


def skip_engine(loaded=None, *, make=None, search=None, **settings):
    """An engine over a planted model with a fast search; `search`: fields of SearchTuning."""
    settings = {"model": "planted", "device": "cpu", "kv_memory": 2**24, "proposer": "skip"} | settings
    tuning = Tuning(search=SearchTuning(**({"share": 0.5, "every": 8} | (search or {}))))
    clock, config = WorkClock(), EngineConfig.of(**settings)

    def make_watched(parts):
        clock.watch(parts.runner)  # first: a proposer copies modules, with their hooks
        return (make or maker_of(config))(parts)

    return Engine(
        loaded or planted(LAYERS, 64), config, tuning=tuning, make_proposer=make_watched, clock=clock
    )


def skip_with_best_set(parts):
    """A maker of `skip` that knows the best set."""
    skip = make_skip(parts)
    skip.fix_set(BEST, 0.98)
    return skip


def generate(engine, num=1, max_tokens=120, seed=0, temperature=0.0):
    """Answers to `num` random prompts together, as token ids."""
    rng = random.Random(seed)
    answers = {}
    for i in range(num):
        prompt = [rng.randrange(256) for _ in range(10)]
        sampling = Sampling(temperature=temperature, seed=i)
        answers[submit(engine, prompt, sampling, max_tokens=max_tokens)] = []
    while not engine.idle:
        for delta in engine.step():
            answers[delta.request_id] += delta.tokens
    engine.check()
    return list(answers.values())

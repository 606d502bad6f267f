"""Public test doubles: tiny random models, a tokenizer, proposers that are wrong on purpose.

An engine takes its model and its proposer as arguments, so nothing has to be patched.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from samewise.config import EngineConfig
from samewise.draft.base import Proposer
from samewise.draft.build import MakeProposer, ProposerParts
from samewise.draft.decode import Decode
from samewise.draft.tuning import Tuning
from samewise.engine import Engine
from samewise.execute.load import Loaded, fingerprint
from samewise.model.arch import inspect_model
from samewise.model.attention_binding import ATTENTION
from samewise.model.load import wrap_modules
from samewise.text.grammar import Grammars
from samewise.types import ROOT, Ask, Delta, LayerSet, Proposal, Request, Sampling

T = TypeVar("T")

COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 24},
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 24,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    },
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]},
    "olmo2": {},
    "phi3": {"original_max_position_embeddings": 512},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.7},
}
"""Supported model families and their distinguishing settings, at a size that runs in milliseconds."""


def tiny_config(family: str = "llama", **overrides: Any) -> Any:
    """A small transformers config of a family."""
    settings = COMMON | FAMILIES[family] | overrides
    return AutoConfig.for_model(family, **settings)


def tiny_model(
    family: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Any:
    """A random transformers model of a family, with weights large enough that its tokens vary."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            tiny_config(family, **overrides), attn_implementation=ATTENTION, dtype=torch.float32
        )
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.18)
            else:
                torch.nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.1)
    return model.to(dtype).eval()


def tiny(
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    eos: bool = False,
    **overrides: Any,
) -> Loaded:
    """A tiny random model ready for an Engine, with a byte-level tokenizer."""
    arch = inspect_model(tiny_config(family, **overrides))
    model = wrap_modules(tiny_model(family, seed=seed, dtype=dtype, **overrides))
    eos_ids = frozenset({257}) if eos else frozenset[int]()
    return Loaded(model, arch, {"weights": fingerprint(model)}, byte_tokenizer(), {}, eos_ids)


PLANTED = LayerSet(frozenset({5}), frozenset({3, 8}))
"""The sublayers of a planted model, between its first and last layer, that matter to its output."""


def planted(
    layers: int = 16, hidden: int = 256, *, keep: LayerSet = PLANTED, faint: float = 1e-3, **overrides: Any
) -> Loaded:
    """A deep model in which most sublayers add almost nothing; those in `keep` and in the end layers matter.

    The best layer set to skip is known by construction: see `planted_best`.
    """
    sizes = {
        "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": 3 * hidden,
        "num_attention_heads": hidden // 32, "num_key_value_heads": hidden // 64, "head_dim": 32,
    }  # fmt: skip
    loaded = tiny("llama", **sizes | overrides)
    with torch.no_grad():
        for i, layer in enumerate(loaded.model.model.layers):  # type: ignore[union-attr, arg-type]
            for out, kept in ((layer.self_attn.o_proj, keep.attention), (layer.mlp.down_proj, keep.mlp)):
                out.weight.mul_(3.0 if i in kept or i in (0, layers - 1) else faint)
    return replace(loaded, facts={"weights": fingerprint(loaded.model)})


def two_topics(layers: int = 12, hidden: int = 128, **overrides: Any) -> Loaded:
    """A planted model with two topics: the lower and the upper half of the vocabulary.

    The MLP of layer 3 works on the first topic only, that of layer 8 on the second, so the best layer set
    changes with the topic. Channel 0 of the residual stream carries the topic.
    """
    loaded = planted(layers, hidden, keep=LayerSet(frozenset({5}), frozenset({3, 8})), **overrides)
    model: Any = loaded.model
    with torch.no_grad():
        sign = torch.ones(model.lm_head.weight.shape[0])
        sign[len(sign) // 2 :] = -1.0
        for layer in model.model.layers:  # no layer writes to channel 0
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.model.embed_tokens.weight[:, 0] = 8.0 * sign
        model.lm_head.weight[:, 0] = sign
        model.model.layers[0].self_attn.o_proj.weight.mul_(0.05)  # keeps channel 0 dominant
        model.model.layers[0].mlp.down_proj.weight.mul_(0.02)
        for place, way in ((3, 1.0), (8, -1.0)):
            layer = model.model.layers[place]
            layer.post_attention_layernorm.weight[0] = 1.0
            layer.mlp.gate_proj.weight[:, 0] = 8.0 * way
            layer.mlp.down_proj.weight.div_(8.0)
    return replace(loaded, facts={"weights": fingerprint(loaded.model)})


def planted_best(layers: int = 16, keep: LayerSet = PLANTED) -> LayerSet:
    """The sublayers that a planted model can skip."""
    middle = frozenset(range(1, layers - 1))
    return LayerSet(middle - keep.attention, middle - keep.mlp)


def tiny_engine(
    family: str = "llama",
    *,
    make_proposer: MakeProposer | None = None,
    tuning: Tuning | None = None,
    seed: int = 0,
    eos: bool = False,
    ahead: bool | None = None,
    overrides: dict[str, Any] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    **settings: Any,
) -> Engine:
    """An engine over a tiny random model. Keywords are EngineConfig's."""
    settings = {"model": f"tiny-{family}", "kv_memory": 2**24, "device": "cpu"} | settings
    dtype = str(settings.get("dtype", "float32"))
    loaded = tiny(family, seed=seed, dtype=getattr(torch, dtype), eos=eos, **(overrides or {}))
    return Engine(
        loaded,
        EngineConfig.of(**settings),
        tuning=tuning,
        make_proposer=make_proposer,
        ahead=ahead,
        clock=clock,
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer made in memory: ids 0–255 are bytes, then three special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, **special)
    tokenizer.chat_template = (
        "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant: {% endif %}"
    )
    return tokenizer


class Scripted(Proposer):
    """Proposes the guesses that a function returns: `script(ask)`."""

    name = "scripted"

    def __init__(self, script: Callable[[Ask], Iterable[int]]) -> None:
        self._script = script

    def propose(self, asks: list[Ask]) -> list[Proposal]:
        """The script's guesses, cut to `ask.room`."""
        return [Proposal(ask.seq_id, tuple(self._script(ask))[: ask.room]) for ask in asks]


class Adversary(Proposer):
    """Proposes random tokens, any number of them, for a random part of the asks in random order."""

    name = "adversary"

    def __init__(self, vocab: int, seed: int = 0) -> None:
        self._vocab, self._random = vocab, random.Random(seed)

    def propose(self, asks: list[Ask]) -> list[Proposal]:
        """Random guesses."""
        picked = [ask for ask in asks if self._random.random() < 0.8]
        self._random.shuffle(picked)
        return [
            Proposal(
                ask.seq_id,
                tuple(self._random.randrange(self._vocab) for _ in range(self._random.randint(0, ask.room))),
            )
            for ask in picked
        ]


class Jitter(Proposer):
    """Drafts with the target model's fast path and noise on its logits.

    Drafts are accepted in part: over a run, first, middle and last guesses are all wrong at times. It writes
    scratch KV, as real drafters do.
    """

    name = "jitter"

    def __init__(self, parts: ProposerParts, *, scale: float = 1.0, num: int = 5, seed: int = 0) -> None:
        generator = torch.Generator(parts.runner.device).manual_seed(seed)

        def add_noise(logits: torch.Tensor) -> torch.Tensor:
            noise = torch.randn(logits.shape, generator=generator, device=logits.device)
            return logits + scale * noise

        self._draft = Decode(parts.runner, parts.sampler, add_noise)
        self._num, self._random = num, random.Random(seed)

    def propose(self, asks: list[Ask]) -> list[Proposal]:
        """Up to `num` guesses for each ask, one pass per guess."""
        guesses: dict[int, list[int]] = {ask.seq_id: [] for ask in asks}
        for _ in range(self._random.randint(0, self._num)):
            live = [
                ask._replace(draft=ask.draft + guesses[ask.seq_id])
                for ask in asks
                if len(guesses[ask.seq_id]) < ask.room
            ]
            for proposal in self._draft.propose(live):
                guesses[proposal.seq_id] += proposal.tokens
        return [Proposal(seq_id, tuple(tokens)) for seq_id, tokens in guesses.items()]


class Bushy(Jitter):
    """Trees of several of Jitter's drafts and of random tokens, their nodes in a random order.

    Right paths stand anywhere in a tree, seldom where they belong; some nodes are wrong, repeated or invalid.
    """

    name = "bushy"
    wants_candidates = True

    def __init__(self, parts: ProposerParts, *, scale: float = 1.0, num: int = 5, seed: int = 0) -> None:
        super().__init__(parts, scale=scale, num=num, seed=seed)
        self._vocab = parts.vocab

    def propose(self, asks: list[Ask]) -> list[Proposal]:
        """A tree for each ask."""
        paths: dict[int, list[tuple[int, ...]]] = {ask.seq_id: [] for ask in asks}
        for _ in range(self._random.randint(1, 4)):
            for proposal in super().propose(asks):
                paths[proposal.seq_id].append(proposal.tokens)
        return [self._tree(seq_id, found) for seq_id, found in paths.items()]

    def _tree(self, seq_id: int, paths: list[tuple[int, ...]]) -> Proposal:
        pick = self._random
        nodes: dict[tuple[int, ...], int] = {(): ROOT}
        tokens: list[int] = []
        parents: list[int] = []
        wanted = [path[:i] for path in paths for i in range(1, len(path) + 1)]
        # Every level by itself in a random order: a parent still stands before its children.
        wanted.sort(key=lambda path: (len(path), pick.random()))
        for path in wanted:
            while pick.random() < 0.3:  # a wrong or invalid node, or a repeated one
                parents.append(pick.choice([ROOT, *range(len(tokens))]))
                tokens.append(pick.choice([pick.randrange(self._vocab), path[-1], -1, self._vocab]))
            if path not in nodes:
                parents.append(nodes[path[:-1]])
                nodes[path] = len(tokens)
                tokens.append(path[-1])
        return Proposal(seq_id, tuple(tokens), drafter=self.name, parents=tuple(parents))


def shuffled(items: Iterable[T], seed: int) -> list[T]:
    """The same items in another order."""
    shuffled_items = list(items)
    random.Random(seed).shuffle(shuffled_items)
    return shuffled_items


class Transcript:
    """What was committed for one request: tokens and exact log-probabilities (as hexadecimal floats)."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[str] = []
        self.scores: list[str] = []
        self.finish: str | None = None

    def take(self, delta: Delta) -> None:
        """Append a delta."""
        self.tokens += delta.tokens
        self.logprobs += [value.hex() for value in delta.logprobs]
        self.scores += [value.hex() for value in delta.scores]
        self.finish = delta.finish.value if delta.finish else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Transcript) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Transcript({self.tokens}, {self.logprobs[:3]}…, {self.finish})"


def paced(engine: Engine, seconds: float = 0.003) -> Engine:
    """The same engine, slowed to a larger model's pace, so that a test can cancel a request in the middle."""
    step = engine.step

    def slower() -> list[Delta]:
        time.sleep(seconds)
        return step()

    engine.step = slower  # type: ignore[method-assign]
    return engine


def preempting(engine: Engine, seed: int, rate: float = 0.2) -> list[Delta]:
    """One step, before which each running sequence is preempted with probability `rate`."""
    rng = random.Random(f"{seed} {engine.scheduler.counters.frames} {engine.scheduler.counters.preempted}")
    for request_id in engine.scheduler.running_ids():
        if rng.random() < rate:
            engine.preempt(request_id)
    return engine.step()


_GRAMMARS: WeakKeyDictionary[Engine, Grammars] = WeakKeyDictionary()


def submit(
    engine: Engine, prompt: Iterable[int], sampling: Sampling, *, max_tokens: int, **fields: Any
) -> int:
    """Queue a request as token ids, unchecked, and return its id. `fields` are those of Request."""
    request = Request(engine.new_id(), tuple(prompt), sampling, max_tokens, **fields)
    guide = None
    if sampling.grammar is not None:
        if engine not in _GRAMMARS:
            loaded = engine.loaded
            _GRAMMARS[engine] = Grammars(loaded.tokenizer, loaded.arch.vocab, loaded.eos_ids)
        guide = _GRAMMARS[engine].guide(sampling.grammar, sampling.stop_ids)
    engine.add(request, guide)
    return request.id


def run(
    engine: Engine,
    asks: Iterable[tuple[list[int], Sampling, int]],
    *,
    step: Callable[[Engine], list[Delta]] = Engine.step,
    arrivals: Iterable[int] | None = None,
    verify: bool = True,
    check: bool = True,
) -> list[Transcript]:
    """Run (prompt, sampling, max_tokens) requests to their end; request i arrives at step `arrivals[i]`."""
    requests = list(asks)
    due = [0] * len(requests) if arrivals is None else list(arrivals)
    transcripts = [Transcript() for _ in requests]
    by_id: dict[int, Transcript] = {}
    num_steps = 0
    while not engine.idle or len(by_id) < len(requests):
        for i, (prompt, sampling, max_tokens) in enumerate(requests):
            if due[i] == num_steps:
                request_id = submit(engine, prompt, sampling, max_tokens=max_tokens, verify=verify)
                by_id[request_id] = transcripts[i]
        for delta in step(engine):
            if delta.request_id in by_id:
                by_id[delta.request_id].take(delta)
        if check:
            engine.check()
        num_steps += 1
    return transcripts


__all__ = [
    "FAMILIES",
    "PLANTED",
    "Adversary",
    "Bushy",
    "Jitter",
    "Scripted",
    "Transcript",
    "byte_tokenizer",
    "paced",
    "planted",
    "planted_best",
    "preempting",
    "run",
    "shuffled",
    "submit",
    "tiny",
    "tiny_config",
    "tiny_engine",
    "tiny_model",
    "two_topics",
]

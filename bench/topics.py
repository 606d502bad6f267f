"""A change of topic on real text: does `skip` notice it, search again and recover?

    python bench/topics.py --workload questions.jsonl --tasks math_reasoning,translation,summarization

A small model has no sublayer to spare. So this one is the embedded model with one copy of every MLP per
topic: at each layer exactly one copy is active, chosen by a first layer from the tokens so far, and the
others add nothing. The model gives the embedded model's logits, but which MLPs can be skipped without loss
depends on the topic.

Tokens are assigned to topics by half of each task's questions; the other half is asked, one task after the
other, then the first task again. The last line is JSON; the picture shows acceptance, phases and skipped
sublayers.
"""

import argparse
import copy
import json
import time
from collections import Counter
from dataclasses import replace
from math import log, sqrt
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from samewise.bench import timeline, workload
from samewise.config import EngineConfig
from samewise.draft.tuning import SearchTuning, Tuning
from samewise.engine import Engine
from samewise.execute.load import fingerprint, load
from samewise.model.arch import inspect_model
from samewise.model.attention_binding import ATTENTION
from samewise.model.load import wrap_modules

NUM_CHANNELS = 32
"""Channels added to the residual stream: a whole group of the weights' four-bit grid."""
MAX_PROMPT = 1200
"""Tokens of a question; longer ones are left out."""
PSEUDO_COUNT = 0.1
"""Occurrences added to each token of each topic, so that a token seen in one topic only stays finite."""
MAX_EVIDENCE = 3.0
"""Limit of one token's log-likelihood ratio: no single token decides."""
FIRST_TOPIC_BIAS = 0.02
"""Added to the first topic, so that one topic is active before any token has evidence."""
SHARPNESS = 2000.0
"""Slope of the comparison of two topics: a small difference already switches completely."""
GATE_WEIGHT = 15 * 2.0**21
"""Weight that closes the gates of a copy for another topic, however small the topic's mark is."""


def topic_evidence(texts, vocab):
    """[topics, vocab]: the log-likelihood ratio of a token for each topic, from texts of each."""
    counts = [Counter(token for text in of_topic for token in text) for of_topic in texts]
    table, tokens = torch.zeros(len(texts), vocab), set().union(*counts)
    for token in tokens:
        logs = [
            log((each[token] + PSEUDO_COUNT) / (each.total() + PSEUDO_COUNT * len(tokens))) for each in counts
        ]
        mean = sum(logs) / len(logs)
        ratios = [max(-MAX_EVIDENCE, min(MAX_EVIDENCE, value - mean)) for value in logs]
        table[:, token] = torch.tensor(ratios)
    table[0] += FIRST_TOPIC_BIAS
    return table


@torch.no_grad()
def copy_per_topic(loaded, table):
    """The model with a copy of each MLP for every topic; `table`: the tokens' evidence for topics."""
    num_topics, old = len(table), loaded.model
    config = copy.deepcopy(old.config)
    width, config.hidden_size = config.hidden_size, config.hidden_size + NUM_CHANNELS
    config.head_dim = loaded.arch.layers[0].head_dim
    config.num_hidden_layers, config.tie_word_embeddings = 1 + num_topics * config.num_hidden_layers, False
    arch = inspect_model(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, dtype=torch.float32)
    model = model.to_empty(device="cpu")
    for weight in model.parameters():
        weight.zero_()
    model.model.rotary_emb = copy.deepcopy(old.model.rotary_emb)
    # Added channels: a constant, the token's evidence per topic, its mean per topic, and a mark per topic.
    constant, token, mean = width, width + 1, width + 1 + num_topics
    mark = mean + num_topics
    scale = float(old.model.embed_tokens.weight.square().mean().sqrt())
    model.model.embed_tokens.weight[:, :width] = old.model.embed_tokens.weight
    model.model.embed_tokens.weight[:, constant] = scale / 4
    model.model.embed_tokens.weight[:, token:mean] = scale / 32 * table.T
    model.lm_head.weight[:, :width] = old.lm_head.weight
    _widen_norm(model.model.norm, old.model.norm, width)

    # The first layer finds the topic: attention averages the evidence, the MLP marks all but the largest.
    first = model.model.layers[0]
    for norm in (first.input_layernorm, first.post_attention_layernorm):
        norm.weight[width:] = 1.0
    for topic in range(num_topics):
        first.self_attn.v_proj.weight[topic, token + topic] = 1.0
        first.self_attn.o_proj.weight[mean + topic, topic] = scale
    pairs = [(a, b) for a in range(num_topics) for b in range(num_topics) if a != b]
    for unit, (loser, winner) in enumerate(pairs):
        first.mlp.gate_proj.weight[unit, mean + winner] = 32 * SHARPNESS
        first.mlp.gate_proj.weight[unit, mean + loser] = -32 * SHARPNESS
        first.mlp.up_proj.weight[unit, constant] = 1.0
        first.mlp.down_proj.weight[mark + loser, unit] = -scale / (8 * SHARPNESS)

    for i, layer in enumerate(old.model.layers):
        for topic in range(num_topics):
            new = model.model.layers[1 + num_topics * i + topic]
            for name in ("input_layernorm", "post_attention_layernorm"):
                _widen_norm(getattr(new, name), getattr(layer, name), width)
            if topic == 0:  # attention stands only in the first copy
                for name in ("q_proj", "k_proj", "v_proj"):
                    getattr(new.self_attn, name).weight[:, :width] = getattr(layer.self_attn, name).weight
                new.self_attn.o_proj.weight[:width] = layer.self_attn.o_proj.weight
            new.post_attention_layernorm.weight[mark:] = 1.0
            for name in ("gate_proj", "up_proj"):
                getattr(new.mlp, name).weight[:, :width] = getattr(layer.mlp, name).weight
            new.mlp.gate_proj.weight[:, mark + topic] = GATE_WEIGHT
            new.mlp.down_proj.weight[:width] = layer.mlp.down_proj.weight
    wrapped = wrap_modules(model)
    return replace(loaded, model=wrapped, arch=arch, facts={"weights": fingerprint(wrapped)})


def _widen_norm(norm, old, width):
    """The mean square over more channels is smaller, because the added ones are nearly zero."""
    norm.weight[:width] = old.weight * sqrt(width / norm.weight.numel())


def prompts_of(tokenizer, questions):
    """Questions as chat prompts, but for those that are too long."""
    chats = [[{"role": "user", "content": question.text}] for question in questions]
    prompts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats
    ]
    return [prompt for prompt in prompts if len(prompt) <= MAX_PROMPT]


def show_events(events, num_topics, num_layers):
    """One line per change of the layer set: how many MLPs of each topic are kept."""
    for event in events:
        skipped = event["set"]["mlp"]
        kept = [sum(i not in skipped for i in range(1 + topic, num_layers, num_topics))
                for topic in range(num_topics)]  # fmt: skip
        print(f"{event['tokens']:6d} tokens  {event['event']:<10}  right {event['rate']:.0%}  MLPs kept, "
              f"by topic: {kept}; attentions skipped: {len(event['set']['attention'])}")  # fmt: skip


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", type=Path, help="in Spec-Bench's format; default: the project's own")
    parser.add_argument("--tasks", default="maths,translating,summarising", help="tasks, in this order")
    parser.add_argument("--limit", type=int, default=8, help="questions per task")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--share", type=float, default=0.1, help="of the time, that the search may take")
    parser.add_argument("--beside", action="store_true", help="also without speculation, to compare speed")
    parser.add_argument("--plot", type=Path, default=Path("bench-out/topics.png"))
    args = parser.parse_args()
    args.plot.parent.mkdir(parents=True, exist_ok=True)
    tasks = args.tasks.split(",")
    max_topics = (NUM_CHANNELS - 1) // 3
    if not 2 <= len(tasks) <= max_topics:
        raise SystemExit(f"--tasks {args.tasks}: give two to {max_topics} of the workload's tasks")
    loaded = load(EngineConfig(model="smollm2", device="cpu", dtype="float32"))
    texts = {task: prompts_of(loaded.tokenizer, workload.read(args.workload, tasks=[task])) for task in tasks}
    training = {task: prompts[1::2] for task, prompts in texts.items()}
    fresh = {task: prompts[::2] for task, prompts in texts.items()}
    table = topic_evidence(list(training.values()), loaded.arch.vocab)
    asked = {task: fresh[task][: args.limit] for task in tasks}
    right = [
        table[:, prompt].mean(1).argmax() == i for i, some in enumerate(asked.values()) for prompt in some
    ]
    print(f"the topic of {sum(right)} of {len(right)} questions follows from their tokens, "
          f"by {sum(map(len, training.values()))} other questions")  # fmt: skip
    asked[f"{tasks[0]} again"] = fresh[tasks[0]][args.limit : 2 * args.limit] or asked[tasks[0]]
    model = copy_per_topic(loaded, table)
    settings = {"model": "topics", "device": "cpu", "kv_memory": 2**31,
                "max_model_len": MAX_PROMPT + args.tokens, "workload": f"bench-{time.time()}"}  # fmt: skip
    tuning = Tuning(search=SearchTuning(share=args.share))
    for proposer in ("none", "skip") if args.beside else ("skip",):
        engine = Engine(model, EngineConfig(**settings, proposer=proposer), tuning=tuning)
        line = timeline.record(engine, asked, args.batch, args.tokens)
        tokens = engine.scheduler.counters.output_tokens
        print(f"{proposer}: {tokens} tokens in {line.seconds:.1f} s, {tokens / line.seconds:.1f} a second")
    show_events(line.events, len(tasks), len(model.arch.layers))
    timeline.plot(line, args.plot, "the embedded model, an MLP for each topic", len(model.arch.layers))
    about = {"contract": engine.contract.id, "threads": torch.get_num_threads(), "torch": torch.__version__}
    print(json.dumps(about | {"tasks": tasks, "batch": args.batch, "tokens": args.tokens} | line.as_json()))


if __name__ == "__main__":
    main()

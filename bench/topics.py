"""A change of topic on real text: does `skip` notice it, search again and recover?

    python bench/topics.py --workload questions.jsonl --tasks math_reasoning,translation,summarization

A small model has no sublayer to spare. So this one is the embedded model with one copy of every MLP per topic: at
each layer exactly one copy is active, chosen by a first layer from the tokens so far, and the others add nothing.
The model gives the embedded model's logits, but which MLPs can be skipped without loss depends on the topic.

Tokens are assigned to topics by half of each task's questions; the other half is asked, one task after the other,
then the first task again. The last line is JSON; the picture shows acceptance, phases and skipped sublayers.
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
    config.num_hidden_layers, config.tie_word_embeddings = 1 + topics * config.num_hidden_layers, False
    arch = inspect_model(config)
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, dtype=torch.float32)
    made = made.to_empty(device="cpu")
    for weight in made.parameters():
        weight.zero_()
    made.model.rotary_emb = copy.deepcopy(old.model.rotary_emb)
    one, said, sums, mark = own, own + 1, own + 1 + topics, own + 1 + 2 * topics  # channels
    spread = float(old.model.embed_tokens.weight.square().mean().sqrt())
    made.model.embed_tokens.weight[:, :own] = old.model.embed_tokens.weight
    made.model.embed_tokens.weight[:, one] = spread / 4
    made.model.embed_tokens.weight[:, said:sums] = spread / 32 * table.T
    made.lm_head.weight[:, :own] = old.lm_head.weight
    _wider(made.model.norm, old.model.norm, own)

    teller = made.model.layers[0]  # attention takes the mean of what words say, the MLP the largest
    for norm in (teller.input_layernorm, teller.post_attention_layernorm):
        norm.weight[own:] = 1.0
    for topic in range(topics):
        teller.self_attn.v_proj.weight[topic, said + topic] = 1.0
        teller.self_attn.o_proj.weight[sums + topic, topic] = spread
    pairs = [(a, b) for a in range(topics) for b in range(topics) if a != b]
    for unit, (loser, winner) in enumerate(pairs):
        teller.mlp.gate_proj.weight[unit, sums + winner] = 32 * SHARPNESS
        teller.mlp.gate_proj.weight[unit, sums + loser] = -32 * SHARPNESS
        teller.mlp.up_proj.weight[unit, one] = 1.0
        teller.mlp.down_proj.weight[mark + loser, unit] = -spread / (8 * SHARPNESS)

    for i, layer in enumerate(old.model.layers):
        for topic in range(topics):
            new = made.model.layers[1 + topics * i + topic]
            for name in ("input_layernorm", "post_attention_layernorm"):
                _wider(getattr(new, name), getattr(layer, name), own)
            if topic == 0:  # the others' attention adds nothing at all
                for name in ("q_proj", "k_proj", "v_proj"):
                    getattr(new.self_attn, name).weight[:, :own] = getattr(layer.self_attn, name).weight
                new.self_attn.o_proj.weight[:own] = layer.self_attn.o_proj.weight
            new.post_attention_layernorm.weight[mark:] = 1.0
            for name in ("gate_proj", "up_proj"):
                getattr(new.mlp, name).weight[:, :own] = getattr(layer.mlp, name).weight
            new.mlp.gate_proj.weight[:, mark + topic] = GATE_WEIGHT
            new.mlp.down_proj.weight[:own] = layer.mlp.down_proj.weight
    wrapped = wrap_modules(made)
    return replace(loaded, model=wrapped, arch=arch, facts={"weights": fingerprint(wrapped)})


def _wider(norm, old, own):
    """A mean over more channels, of which the new ones are next to nothing, is smaller."""
    norm.weight[:own] = old.weight * sqrt(own / norm.weight.numel())


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workload", type=Path, help="questions in Spec-Bench's format; else the project's own"
    )
    parser.add_argument(
        "--tasks", default="maths,translating,summarising", help="of its tasks, one after the other"
    )
    parser.add_argument("--limit", type=int, default=8, help="questions of each task that are asked")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--beside", action="store_true", help="also without speculation, for the pace")
    parser.add_argument("--plot", type=Path, default=Path("bench-out/topics.png"))
    args = parser.parse_args()
    args.plot.parent.mkdir(parents=True, exist_ok=True)
    tasks = args.tasks.split(",")
    if not 2 <= len(tasks) <= (NUM_CHANNELS - 1) // 3:
        raise SystemExit(f"--tasks {args.tasks}: give two to {(NUM_CHANNELS - 1) // 3} of the workload's tasks")
    loaded = load(EngineConfig(model="smollm2", device="cpu", dtype="float32"))
    texts = {task: prompts(loaded.tokenizer, workload.read(args.workload, tasks=[task])) for task in tasks}
    known = {task: some[1::2] for task, some in texts.items()}
    fresh = {task: some[::2] for task, some in texts.items()}
    table = evidence(list(known.values()), loaded.arch.vocab)
    asked = {task: fresh[task][: args.limit] for task in tasks}
    told = [table[:, text].mean(1).argmax() == i for i, some in enumerate(asked.values()) for text in some]
    print(f"{sum(told)} of {len(told)} questions are told by their words, "
          f"which {sum(map(len, known.values()))} others taught")  # fmt: skip
    asked[f"{tasks[0]} again"] = fresh[tasks[0]][args.limit : 2 * args.limit] or asked[tasks[0]]
    model = copy_per_topic(loaded, table)
    settings = {"model": "topics", "device": "cpu", "kv_memory": 2**31,
                "max_model_len": MAX_PROMPT + args.tokens, "workload": f"bench-{time.time()}"}  # fmt: skip
    for proposer in ("none", "skip") if args.beside else ("skip",):
        tuning = Tuning(search=SearchTuning(share=args.share))
        engine = Engine(model, EngineConfig(**settings, proposer=proposer), tuning=tuning)
        line = timeline.record(engine, asked, args.batch, args.tokens)
        tokens = engine.scheduler.counters.output_tokens
        print(f"{proposer}: {tokens} tokens in {line.seconds:.1f} s, {tokens / line.seconds:.1f} a second")
    for event in line.events:
        left = event["set"]["mlp"]
        kept = [sum(i not in left for i in range(1 + topic, len(model.arch.layers), len(tasks)))
                for topic in range(len(tasks))]  # fmt: skip
        print(f"{event['tokens']:6d} tokens  {event['event']:<10}  right {event['rate']:.0%}  MLPs kept, "
              f"by topic: {kept}; attentions left out: {len(event['set']['attention'])}")  # fmt: skip
    timeline.plot(line, args.plot, "the embedded model, an MLP for each topic", len(model.arch.layers))
    about = {"contract": engine.contract.id, "threads": torch.get_num_threads(), "torch": torch.__version__}
    print(json.dumps(about | {"tasks": tasks, "batch": args.batch, "tokens": args.tokens} | line.as_json()))


def prompts(tokenizer, questions):
    """Questions as a chat, unless they are too long."""
    chats = [[{"role": "user", "content": question.text}] for question in questions]
    made = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats
    ]
    return [text for text in made if len(text) <= MAX_PROMPT]


if __name__ == "__main__":
    main()

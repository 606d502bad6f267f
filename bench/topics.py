"""A change of topic on real text: does `skip` notice, search again and recover?

    python bench/topics.py --workload questions.jsonl --tasks math_reasoning,translation,summarization

A small model has no sublayer to spare, so none whose loss depends on the topic. This one is the embedded
model with every MLP once for each topic: each copy works on one of them and adds nothing on the others. Which
it is, a first layer tells by the words so far. Exactly one copy works at every place, so the model says what
the embedded one says; but what can be left out without loss changes with the topic.

Words are told apart by half of each task's questions; the other half is asked, one task after the other, then
the first again. The last line is JSON; the picture has acceptance, phases and the sublayers left out.
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
from samewise.engine import Engine
from samewise.execute.load import fingerprint, load
from samewise.model.arch import inspect_model
from samewise.model.attention_binding import ATTENTION
from samewise.model.load import wrap_modules

EXTRA = 32  # channels of the residual stream beside the model's own: a whole group of its four-bit grid
LONGEST = 1200  # tokens of a question
FEW = 0.1  # times that a word is taken to have been said, beside those it was
CLIP = 3.0  # of what one word may say for a topic
LEAN = 0.02  # to the first topic, where no word has said anything
SHARP = 2000.0  # how clearly a little more of one topic than of another is one topic alone
SHUT = 15 * 2.0**21  # what closes the gates of the copies for other topics, by a mark however faint


def evidence(texts, vocab):
    """[topics, vocab]: how much a token says for each topic, by texts of each."""
    counts = [Counter(token for text in some for token in text) for some in texts]
    table, words = torch.zeros(len(texts), vocab), set().union(*counts)
    for token in words:
        chances = [log((each[token] + FEW) / (each.total() + FEW * len(words))) for each in counts]
        middle = sum(chances) / len(chances)
        table[:, token] = torch.tensor([max(-CLIP, min(CLIP, chance - middle)) for chance in chances])
    table[0] += LEAN
    return table


@torch.no_grad()
def manifold(loaded, table):
    """The same model with a copy of each MLP for every topic; `table` is what words say of them."""
    topics, old = len(table), loaded.model
    config = copy.deepcopy(old.config)
    own, config.hidden_size = config.hidden_size, config.hidden_size + EXTRA
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
        teller.mlp.gate_proj.weight[unit, sums + winner] = 32 * SHARP
        teller.mlp.gate_proj.weight[unit, sums + loser] = -32 * SHARP
        teller.mlp.up_proj.weight[unit, one] = 1.0
        teller.mlp.down_proj.weight[mark + loser, unit] = -spread / (8 * SHARP)

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
            new.mlp.gate_proj.weight[:, mark + topic] = SHUT
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
    if not 2 <= len(tasks) <= (EXTRA - 1) // 3:
        raise SystemExit(f"--tasks {args.tasks}: give two to {(EXTRA - 1) // 3} of the workload's tasks")
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
    model = manifold(loaded, table)
    settings = {"model": "manifold", "device": "cpu", "kv_memory": 2**31, "search_share": args.share,
                "max_model_len": LONGEST + args.tokens, "workload": f"bench-{time.time()}"}  # fmt: skip
    for proposer in ("none", "skip") if args.beside else ("skip",):
        engine = Engine(model, EngineConfig(**settings, proposer=proposer))
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
    return [text for text in made if len(text) <= LONGEST]


if __name__ == "__main__":
    main()

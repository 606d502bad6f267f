"""Tokens per frame of draft trees on recorded text, by kind of question and number of nodes. No model is run.

    python bench/drafts.py                                  # recorded text in ../shared/data
    python bench/drafts.py --record traces.json.gz --limit 2   # records text of a model first
    python bench/drafts.py --traces traces.json.gz --fresh

A trace is a greedy answer with the top 8 at every position: `kind`, `prompt` and `answer` as token ids,
`prompt_tops[i]` and `tops[i]` the candidates for prompt token i and answer token i, most probable first, and
where known their probabilities `prompt_probs` and `probs`. Each frame verifies one tree and commits its right
path and one token more. The frame that reads the prompt commits the first token, drafts nothing and is not
counted. Rows of rejected nodes, which a frame replays too, are not in a trace and are not recycled.

Answers come in the file's order. Kept: each starts with the table, the store and the estimates that earlier
answers left, as on a server. `--fresh`: each starts with nothing. The last line is JSON.
"""

import argparse
import gzip
import json
import sys
import time
from array import array
from collections import Counter
from dataclasses import dataclass
from math import exp
from pathlib import Path

from samewise.draft.ngram import Ngram
from samewise.draft.recycle import WIDTH
from samewise.draft.tree_drafter import TreeDrafter
from samewise.types import Ask, Sampling

TRACES = Path(__file__).parents[2] / "shared/data/traces_1.5b_odd.json.gz"
NODES = (4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Trace:
    """A greedy answer; rows are padded to 8 candidates. Probabilities are None where they are not known."""

    kind: str
    prompt: list[int]
    answer: list[int]
    prompt_tops: list[list[int]]
    tops: list[list[int]]
    prompt_probs: list[list[float]] | None
    probs: list[list[float]] | None


def read(path):
    """The traces of a file, as JSON or gzipped JSON."""
    content = path.read_bytes()
    entries = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    return [
        Trace(
            entry["kind"],
            entry["prompt"],
            entry["answer"],
            padded(entry["prompt_tops"], -1),
            padded(entry["tops"], -1),
            padded(entry.get("prompt_probs"), 0.0),
            padded(entry.get("probs"), 0.0),
        )
        for entry in entries
    ]


def padded(rows, filler):
    """Rows of exactly 8 entries."""
    return rows and [[*row, *[filler] * (WIDTH - len(row))] for row in rows]


class Trees:
    """Draft trees from suffix counts, recycled candidates and runners-up."""

    def __init__(self, vocab, nodes, *, prompt_rows):
        self.drafter = TreeDrafter(vocab)
        self.nodes, self.prompt_rows, self.seconds = nodes, prompt_rows, 0.0

    def begin(self, number, trace):
        self.drafter.begin(number, trace.prompt)
        if self.prompt_rows:  # of a prompt's rows, all but the last: it chooses the answer's first token
            probs = trace.prompt_probs and trace.prompt_probs[1:]
            self.drafter.remember(number, trace.prompt[:-1], trace.prompt_tops[1:], probs)

    def accepted(self, number, trace, start):
        """Tokens of the answer from `start` on that the tree for this position holds."""
        begun = time.process_time()
        tree = self.drafter.grow(number, self.nodes)
        self.seconds += time.process_time() - begun
        return len(tree.path(trace.answer[start:]))

    def commit(self, number, trace, start, end):
        begun = time.process_time()
        probs = trace.probs and trace.probs[start:end]
        self.drafter.commit(number, trace.answer[start:end], trace.tops[start:end], probs)
        self.seconds += time.process_time() - begun

    def forget(self, number):
        self.drafter.forget(number)


class Chains:
    """The `ngram` proposer: the continuation of the longest match, as one chain."""

    def __init__(self, vocab, nodes, *, prompt_rows):
        del vocab, prompt_rows
        self.proposer, self.nodes, self.seconds = Ngram(), nodes, 0.0

    def begin(self, number, trace):
        pass

    def accepted(self, number, trace, start):
        begun = time.process_time()
        tokens = trace.prompt + trace.answer[:start]
        ask = Ask(number, tokens, len(trace.prompt), [], len(tokens) - 1, array("i"), Sampling(), self.nodes)
        drafted = [token for proposal in self.proposer.propose([ask]) for token in proposal.tokens]
        self.seconds += time.process_time() - begun
        pairs = zip(drafted, trace.answer[start:], strict=False)
        return next(
            (i for i, (guess, truth) in enumerate(pairs) if guess != truth),
            min(len(drafted), len(trace.answer) - start),
        )

    def commit(self, number, trace, start, end):
        pass

    def forget(self, number):
        self.proposer.forget(number)


def replay(traces, make, *, fresh):
    """(tokens, frames) by kind, and seconds of drafting per frame; `make` builds the drafts' source."""
    tokens, frames, seconds = Counter(), Counter(), 0.0
    source = make()
    for number, trace in enumerate(traces):
        if fresh and number:
            seconds += source.seconds
            source = make()
        source.begin(number, trace)
        source.commit(number, trace, 0, 1)
        start = 1
        while start < len(trace.answer):
            end = min(start + source.accepted(number, trace, start) + 1, len(trace.answer))
            source.commit(number, trace, start, end)
            tokens[trace.kind] += end - start
            frames[trace.kind] += 1
            start = end
        source.forget(number)
    return tokens, frames, (seconds + source.seconds) / max(1, frames.total())


def record(args):
    """Write traces of a model's greedy answers to a workload's questions."""
    from samewise import LLM, SamplingParams
    from samewise.bench import workload

    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, logprobs=WIDTH, prompt_logprobs=WIDTH)
    questions = workload.read(args.workload, limit=args.limit)
    with LLM(args.model, proposer="none", enable_prefix_caching=False) as llm:
        prompts = [llm.chat_prompt([{"role": "user", "content": question.text}]) for question in questions]
        kept = [(q, p) for q, p in zip(questions, prompts, strict=True) if len(p) <= args.max_prompt]
        outputs = llm.generate([prompt for _, prompt in kept], params)
    traces = []
    for (question, prompt), output in zip(kept, outputs, strict=True):
        answer = output.outputs[0]
        prompt_tops, prompt_probs = rows_of(output.prompt_logprobs)
        tops, probs = rows_of(answer.logprobs)
        traces.append({"kind": question.task, "prompt": list(prompt), "answer": list(answer.token_ids),
                       "prompt_tops": prompt_tops, "tops": tops,
                       "prompt_probs": prompt_probs, "probs": probs})  # fmt: skip
    text = json.dumps(traces, separators=(",", ":"))
    args.record.write_bytes(gzip.compress(text.encode()) if args.record.suffix == ".gz" else text.encode())
    num_tokens = sum(len(trace["answer"]) for trace in traces)
    print(f"{args.record}: {len(traces)} answers, {num_tokens} tokens; {len(questions) - len(kept)} too long")


def rows_of(logprobs):
    """The candidates of each position and their probabilities, most probable first."""
    rows = []
    for entries in logprobs:
        ranked = sorted(
            (entry.rank, token, entry.logprob)
            for token, entry in (entries or {}).items()
            if entry.rank is not None and entry.rank <= WIDTH
        )
        rows.append(([token for _, token, _ in ranked], [round(exp(value), 5) for *_, value in ranked]))
    return [tokens for tokens, _ in rows], [probs for _, probs in rows]


def measure(traces, args):
    """Tokens per frame of each source at each number of nodes, by kind and in all."""
    vocab = 1 + max(
        max(*trace.prompt, *map(max, trace.prompt_tops), *trace.answer, *map(max, trace.tops))
        for trace in traces
    )
    figures = {}
    for name, source in (("tree", Trees), ("ngram", Chains)):
        for nodes in args.nodes:
            tokens, frames, seconds = replay(
                traces,
                lambda s=source, n=nodes: s(vocab, n, prompt_rows=not args.no_prompt_rows),
                fresh=args.fresh,
            )
            by_kind = {kind: tokens[kind] / frames[kind] for kind in sorted(frames)}
            figures.setdefault(name, {})[nodes] = {
                "all": tokens.total() / frames.total(), "host_us": seconds * 1e6, "kinds": by_kind
            }  # fmt: skip
    return figures


def show(figures, nodes):
    """A table: one row for each kind, all kinds together, and the host's time."""
    width = max(len(kind) for kind in [*figures["tree"][nodes[0]]["kinds"], "host us per frame"])
    for name, by_nodes in figures.items():
        print(f"{name:<{width}}" + "".join(f"{f'{n} nodes':>10}" for n in nodes))
        for kind in by_nodes[nodes[0]]["kinds"]:
            print(f"{kind:<{width}}" + "".join(f"{by_nodes[n]['kinds'][kind]:10.2f}" for n in nodes))
        print(f"{'all':<{width}}" + "".join(f"{by_nodes[n]['all']:10.3f}" for n in nodes))
        print(
            f"{'host us per frame':<{width}}"
            + "".join(f"{by_nodes[n]['host_us']:10.0f}" for n in nodes)
            + "\n"
        )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--nodes", default=",".join(map(str, NODES)), help="sizes of a tree")
    parser.add_argument("--fresh", action="store_true", help="keep nothing between answers")
    parser.add_argument("--no-prompt-rows", action="store_true",
                        help="recycle no rows of prompts, as where these have no logits")  # fmt: skip
    parser.add_argument("--record", type=Path, metavar="OUT", help="record traces first, then replay them")
    parser.add_argument("--model", default="smollm2", help="of --record")
    parser.add_argument("--workload", type=Path, help="of --record; in Spec-Bench's format")
    parser.add_argument("--limit", type=int, default=2, help="of --record: questions of each kind")
    parser.add_argument("--tokens", type=int, default=128, help="of --record: of an answer, at most")
    parser.add_argument("--max-prompt", type=int, default=1024, help="of --record: leave out longer prompts")
    args = parser.parse_args()
    args.nodes = [int(number) for number in args.nodes.split(",")]
    if args.record:
        record(args)
        args.traces = args.record
    if not args.traces.exists():
        sys.exit(f"--traces {args.traces}: no such file; record one with --record")
    traces = read(args.traces)
    figures = measure(traces, args)
    print(f"{len(traces)} answers, {sum(len(t.answer) for t in traces)} tokens, "
          f"{'fresh' if args.fresh else 'kept'}; tokens per frame\n")  # fmt: skip
    show(figures, args.nodes)
    print(json.dumps({"traces": args.traces.name, "fresh": args.fresh, "prompt_rows": not args.no_prompt_rows}
                     | figures))  # fmt: skip


if __name__ == "__main__":
    main()

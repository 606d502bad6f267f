"""Tokens per frame of draft trees on recorded text, by kind of question and number of nodes. No model is run.

    python bench/drafts.py --traces traces.json.gz [--fresh]
    python bench/drafts.py --record smollm2 --questions questions.jsonl --out traces.json.gz

A trace is a greedy answer with the top 8 of every position: `kind`, `prompt` and `answer` as token ids, and
`tops[i]`, the candidates for answer token i, most probable first. The proposers are the engine's own, told
what the engine tells them: each frame verifies one tree and commits its right path and one token more. The
frame that reads the prompt commits the first token, drafts nothing and is not counted. Rows of rejected
nodes, which a frame computes too, are not in a trace and are not recycled.

`--record` lets a model answer questions in Spec-Bench's format, writes the traces and replays them.
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
from pathlib import Path

import numpy as np

from samewise.draft.build import make_tree_drafter
from samewise.draft.recycle import WIDTH
from samewise.draft.tree import DraftTree
from samewise.draft.tree_drafter import TreeDrafter
from samewise.draft.tree_proposer import NAMES, TreeProposer
from samewise.draft.tuning import TreeTuning
from samewise.types import MAX_TREE_DEPTH, Ask, Candidates, Sampling, Verdict

NODES = (4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Trace:
    """A greedy answer. `tops` [answer, 8]: the candidates of the row that chose each token."""

    kind: str
    prompt: list[int]
    answer: list[int]
    tops: np.ndarray


def read(path):
    """The traces of a file, as JSON or gzipped JSON."""
    content = path.read_bytes()
    entries = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    return [Trace(e["kind"], e["prompt"], e["answer"], padded(e["tops"])) for e in entries]


def padded(rows):
    """As rows of exactly 8 entries; -1 fills short ones."""
    return np.array([[*row, *[-1] * (WIDTH - len(row))] for row in rows], np.int32)


class Replay:
    """A proposer that is told about recorded answers as the engine tells it about live ones."""

    def __init__(self, proposer, nodes):
        self.proposer, self.nodes, self.seconds = proposer, nodes, 0.0

    def run(self, number, trace):
        """(tokens, frames) of an answer."""
        tokens, frames = [*trace.prompt], 0
        self.timed(self.proposer.meet, [self.ask(number, trace, tokens)])
        self.commit(number, trace, tokens, (), ())
        while len(tokens) < len(trace.prompt) + len(trace.answer):
            done = len(tokens) - len(trace.prompt)
            drafted = self.timed(self.proposer.propose, [self.ask(number, trace, tokens)])
            tree = DraftTree(drafted[0].tokens, drafted[0].parents) if drafted else DraftTree()
            self.commit(number, trace, tokens, tree.path(trace.answer[done:-1]), tree.tokens)
            frames += 1
        self.proposer.forget(number)
        return len(trace.answer) - 1, frames

    def ask(self, number, trace, tokens):
        prompt_len = len(trace.prompt)
        room = len(trace.answer) + prompt_len - len(tokens) - 1
        return Ask(number, tokens, prompt_len, [], len(tokens) - 1, array("i"), Sampling(),
                   min(room, MAX_TREE_DEPTH), max_nodes=self.nodes)  # fmt: skip

    def commit(self, number, trace, tokens, path, guesses):
        """Commit the answer's tokens along a path of the tree, and one more."""
        done = len(tokens) - len(trace.prompt)
        new = tuple(trace.answer[done : done + len(path) + 1])
        # Rows of rejected nodes are not in a trace: what is passed on is the chain that was right.
        candidates = Candidates((tokens[-1], *new[:-1]), trace.tops[done : done + len(new)])
        tokens += new
        verdict = Verdict(number, new, (), (), len(tokens) - 1, len(guesses), len(path),
                          drafter=self.proposer.name, candidates=candidates)  # fmt: skip
        self.timed(self.proposer.observe, [verdict])

    def timed(self, call, *args):
        begun = time.perf_counter()
        result = call(*args)
        self.seconds += time.perf_counter() - begun
        return result


def replay(traces, make, *, fresh):
    """(tokens, frames) by kind, seconds of drafting per frame, and the last proposer's memory in bytes."""
    tokens, frames, seconds = Counter(), Counter(), 0.0
    source = make()
    for number, trace in enumerate(traces):
        if fresh and number:
            seconds += source.seconds
            source = make()
        num_tokens, num_frames = source.run(number, trace)
        tokens[trace.kind] += num_tokens
        frames[trace.kind] += num_frames
    (report,) = source.proposer.stats().values()
    memory = {name: report[name] for name in ("table_bytes", "store_bytes")}
    return tokens, frames, (seconds + source.seconds) / max(1, frames.total()), memory


def record(args):
    """Write traces of a model's greedy answers to questions."""
    from samewise import LLM, SamplingParams
    from samewise.bench import workload

    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, logprobs=WIDTH)
    questions = workload.read(args.questions, limit=args.limit)
    with LLM(args.record, proposer="none", enable_prefix_caching=False) as llm:
        prompts = [llm.chat_prompt([{"role": "user", "content": question.text}]) for question in questions]
        kept = [(q, p) for q, p in zip(questions, prompts, strict=True) if len(p) <= args.max_prompt]
        outputs = llm.generate([prompt for _, prompt in kept], params)
    traces = []
    for (question, prompt), output in zip(kept, outputs, strict=True):
        answer = output.outputs[0]
        tops = [top_ids(entries) for entries in answer.logprobs]
        answer_ids = list(answer.token_ids)
        traces.append({"kind": question.task, "prompt": list(prompt), "answer": answer_ids, "tops": tops})
    text = json.dumps(traces, separators=(",", ":")).encode()
    args.out.write_bytes(gzip.compress(text) if args.out.suffix == ".gz" else text)
    num_tokens = sum(len(trace["answer"]) for trace in traces)
    print(f"{args.out}: {len(traces)} answers, {num_tokens} tokens; {len(questions) - len(kept)} too long")


def top_ids(entries):
    """The candidates of a position, most probable first."""
    ranked = [(entry.rank, token) for token, entry in entries.items() if entry.rank is not None]
    return [token for rank, token in sorted(ranked) if rank <= WIDTH]


def make_replay(vocab, sources, nodes, *, python):
    """A proposer of trees of exactly so many nodes."""
    tuning = TreeTuning(min_prob=0.0, max_nodes=nodes)
    drafter = (TreeDrafter if python else make_tree_drafter)(vocab, sources, tuning)
    return Replay(TreeProposer(drafter, sources, tuning), nodes)


def measure(traces, args):
    """Tokens per frame of each proposer at each number of nodes, by kind and in all."""
    vocab = 1 + max(max(*trace.prompt, *trace.answer, int(trace.tops.max())) for trace in traces)
    figures = {}
    for sources, name in NAMES.items():
        for nodes in args.nodes:
            tokens, frames, seconds, memory = replay(
                traces,
                lambda s=sources, n=nodes: make_replay(vocab, s, n, python=args.python),
                fresh=args.fresh,
            )
            by_kind = {kind: tokens[kind] / frames[kind] for kind in sorted(frames)}
            figures.setdefault(name, {})[nodes] = {
                "all": tokens.total() / frames.total(), "host_us": seconds * 1e6, "kinds": by_kind, **memory
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
        print(f"{'host us per frame':<{width}}" + "".join(f"{by_nodes[n]['host_us']:10.0f}" for n in nodes))
        table, store = (by_nodes[nodes[-1]][part] / 1e6 for part in ("table_bytes", "store_bytes"))
        print(f"table {table:.1f} MB, store {store:.1f} MB at the end\n")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, help="recorded text; needed without --record")
    parser.add_argument("--nodes", default=",".join(map(str, NODES)), help="sizes of a tree")
    parser.add_argument("--fresh", action="store_true", help="keep nothing between answers")
    parser.add_argument("--python", action="store_true", help="grow trees in Python, not in C++")
    parser.add_argument("--record", metavar="MODEL", help="record its answers first, then replay them")
    parser.add_argument("--questions", type=Path, help="of --record; without, the project's own")
    parser.add_argument("--out", type=Path, default=Path("traces.json.gz"), help="of --record")
    parser.add_argument("--limit", type=int, default=2, help="of --record: questions of each kind")
    parser.add_argument("--tokens", type=int, default=128, help="of --record: of an answer, at most")
    parser.add_argument("--max-prompt", type=int, default=1024, help="of --record: leave out longer prompts")
    args = parser.parse_args()
    args.nodes = [int(number) for number in args.nodes.split(",")]
    if args.record:
        record(args)
        args.traces = args.out
    if args.traces is None:
        parser.error("give recorded text with --traces FILE, or record some with --record MODEL")
    if not args.traces.exists():
        sys.exit(f"--traces {args.traces}: no such file; record one with --record")
    traces = read(args.traces)
    figures = measure(traces, args)
    print(f"{len(traces)} answers, {sum(len(t.answer) for t in traces)} tokens, "
          f"{'fresh' if args.fresh else 'kept'}; tokens per frame\n")  # fmt: skip
    show(figures, args.nodes)
    print(json.dumps({"traces": args.traces.name, "fresh": args.fresh} | figures))


if __name__ == "__main__":
    main()

"""Tokens per frame of draft trees on recorded text, by kind of question and number of nodes. No model is run.

    python bench/drafts.py --traces traces.json.gz [--fresh]
    python bench/drafts.py --traces traces.json.gz --live 1,8,32 [--costs 1:2.03,32:2.44,…] [--gaps 1:0.2,…]
    python bench/drafts.py --record smollm2 --questions questions.jsonl --out traces.json.gz

A trace is a greedy answer with the top 8 of every position: `kind`, `prompt` and `answer` as token ids, and
`tops[i]`, the candidates for answer token i, most probable first. The proposers are the engine's own, told
what the engine tells them: each frame verifies one tree and commits its right path and one token more. The
frame that reads the prompt commits the first token, drafts nothing and is not counted. Rows of rejected
nodes, which a frame computes too, are not in a trace and are not recycled.

`--record` lets a model answer questions in Spec-Bench's format, writes the traces and replays them.
`--live` lets `auto` draft for so many answers at once, of all kinds in turn, on a device that takes the given
milliseconds for a frame of so many rows (padded to the next size) and waits the given ones between frames
where drafts were asked for. It prints tokens per second over `none`, which has a token of each answer per
frame and no gap, by kind: the tokens of its answers over the time that they ran. Counted while all are live.

Answers come in the file's order. Kept: each starts with the table, the store and the estimates that earlier
answers left, as on a server. `--fresh`: each starts with nothing. The last line is JSON.
"""

import argparse
import gzip
import json
import random
import sys
import time
from array import array
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from samewise.draft.auto.auto import Auto
from samewise.draft.build import make_tree_drafter
from samewise.draft.cost_model import FrameCosts
from samewise.draft.recycle import WIDTH
from samewise.draft.tree import DraftTree
from samewise.draft.tree_drafter import TreeDrafter
from samewise.draft.tree_proposer import NAMES, TreeProposer
from samewise.draft.tuning import TreeTuning
from samewise.types import MAX_TREE_NODES, Ask, Candidates, Sampling, Verdict

NODES = (4, 8, 16, 32, 64)
DEPTH = 16
"""Levels of a tree: what the engine's `draft_tokens` is by default."""
COSTS = "1:2.03,8:2.09,16:2.21,32:2.44,64:2.69,128:2.84"
"""Measured on an H200 with a 1.5B model, in ms by rows; 16 rows are between 8 and 32."""
GAPS = "1:0.2,8:0.25,32:0.6"
"""The same: ms from a frame's landing to the next one's launch, by live sequences."""
MIN_NODES = 16
"""Nodes that each tree may have where many sequences share a frame, as the engine's limits have it."""


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
                   min(room, DEPTH), max_nodes=self.nodes)  # fmt: skip

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


class Running:
    """An answer of the simulated engine, and its tree in the frame in flight."""

    def __init__(self, number, trace):
        self.number, self.trace, self.tree = number, trace, DraftTree()
        self.tokens = [*trace.prompt, trace.answer[0]]

    @property
    def left(self):
        return len(self.trace.prompt) + len(self.trace.answer) - len(self.tokens)

    def ask(self, max_nodes):
        return Ask(self.number, self.tokens, len(self.trace.prompt), [], len(self.tokens) - 1, array("i"),
                   Sampling(), min(self.left - 1, DEPTH), max_nodes=max_nodes)  # fmt: skip

    def land(self):
        """The verdict of the frame, whose tokens are appended."""
        done, tree, last = len(self.tokens) - len(self.trace.prompt), self.tree, self.tokens[-1]
        path = tree.path(self.trace.answer[done:-1])
        new = tuple(self.trace.answer[done : done + len(path) + 1])
        candidates = Candidates((last, *new[:-1]), self.trace.tops[done : done + len(new)])
        self.tokens += new
        self.tree = DraftTree()
        return Verdict(self.number, new, (), (), len(self.tokens) - 1, len(tree), len(path), drafter="tree",
                       candidates=candidates)  # fmt: skip


def between(table, at):
    """The entry of a table for a number, on a line between its neighbours, and the last one beyond."""
    return float(np.interp(at, list(table), list(table.values())))


class SimulatedEngine:
    """`auto` over answers that run at once, on a device whose frames take given seconds."""

    def __init__(self, traces, live, costs, gaps, drafter):
        self.waiting, self.live = list(enumerate(traces))[::-1], live
        self.costs, self.gap = costs, between(gaps, live)
        self.max_nodes = min(MAX_TREE_NODES, max(MIN_NODES, max(costs) // live))
        self.now, self.frames = 0.0, FrameCosts(tuple(costs))
        for size, spent in 32 * list(costs.items()):  # as after a warm-up
            self.frames.observe(size, spent)
        trees = TreeProposer(drafter)
        self.auto = Auto(trees, [], self.frames, lambda: self.now, max_tokens=DEPTH, ahead=True)
        self.running, self.num_nodes, self.num_frames, self.num_asked = [], 0, 0, 0
        self.tokens, self.seconds = Counter(), Counter()  # of each kind while all places are taken

    def run(self):
        """Until the first place stays empty."""
        while self.admit():
            self.step()

    def admit(self):
        while self.waiting and len(self.running) < self.live:
            number, trace = self.waiting.pop()
            if len(trace.answer) > 1:
                answer = Running(number, trace)
                self.running.append(answer)
                self.auto.meet([answer.ask(0)._replace(tokens=trace.prompt)])
                verdict = Verdict(number, (trace.answer[0],), (), (), len(trace.prompt), 0, 0,
                                  candidates=Candidates((trace.prompt[-1],), trace.tops[:1]))  # fmt: skip
                self.auto.observe([verdict])
        return len(self.running) == self.live

    def step(self):
        rows = self.live + sum(len(answer.tree) for answer in self.running)
        self.num_frames += 1
        self.num_nodes += rows - self.live
        sizes = list(self.costs)
        spent = self.costs[sizes[bisect_left(sizes, rows)]]
        self.now += spent
        self.frames.observe(rows, spent)
        was_quiet, kinds = self.auto.quiet, [answer.trace.kind for answer in self.running]
        verdicts = [answer.land() for answer in self.running]
        self.auto.observe(verdicts)
        self.tokens.update(dict_sum(kinds, [len(verdict.tokens) for verdict in verdicts]))
        for answer in [answer for answer in self.running if not answer.left]:
            self.running.remove(answer)
            self.auto.forget(answer.number)
        self.admit()
        if not was_quiet:
            self.num_asked += 1
            self.now += self.gap
            spent += self.gap
            by_number = {answer.number: answer for answer in self.running}
            for proposal in self.auto.propose([answer.ask(self.max_nodes) for answer in self.running]):
                by_number[proposal.seq_id].tree = DraftTree(proposal.tokens, proposal.parents)
        self.seconds.update(dict_sum(kinds, [spent] * len(kinds)))

    def ratios(self):
        """Tokens per second over those without drafts, by kind and in all."""
        plain = self.costs[min(size for size in self.costs if size >= self.live)]
        ratios = {kind: self.tokens[kind] * plain / self.seconds[kind] for kind in sorted(self.tokens)}
        return ratios | {"all": self.tokens.total() * plain / sum(self.seconds.values())}


def dict_sum(keys, values):
    sums = Counter()
    for key, value in zip(keys, values, strict=True):
        sums[key] += value
    return sums


def in_turns(traces, rng):
    """One of each kind after the other, in a random order."""
    kinds = {}
    for trace in sorted(traces, key=lambda _: rng.random()):
        kinds.setdefault(trace.kind, []).append(trace)
    order = [(i / len(of_kind), i, trace) for of_kind in kinds.values() for i, trace in enumerate(of_kind)]
    return [trace for _, _, trace in sorted(order, key=lambda entry: entry[:2])]


def simulate(traces, args):
    """Ratios by kind for each number of live sequences, over several orders of the answers."""
    make, figures = (TreeDrafter if args.python else make_tree_drafter), {}
    vocab = vocab_of(traces)
    for live in args.live:
        tokens, seconds, counts = Counter(), Counter(), Counter()
        for seed in range(args.orders):
            order = in_turns(traces, random.Random(seed))
            engine = SimulatedEngine(order, live, args.costs, args.gaps, make(vocab))
            engine.run()
            tokens.update(engine.tokens)
            seconds.update(engine.seconds)
            counts.update(frames=engine.num_frames, nodes=engine.num_nodes, asked=engine.num_asked)
        engine.tokens, engine.seconds = tokens, seconds
        figures[live] = engine.ratios() | {
            "nodes": counts["nodes"] / max(1, counts["frames"]),
            "asked": counts["asked"] / max(1, counts["frames"]),
        }
    return figures


def show_live(figures):
    """A table: one row for each kind, all together, nodes of a frame, and the share of frames asked for."""
    names = list(next(iter(figures.values())))
    print(f"{'tokens/s over none':<20}" + "".join(f"{f'{live} live':>10}" for live in figures))
    for name in names:
        print(f"{name:<20}" + "".join(f"{figures[live].get(name, 0.0):10.2f}" for live in figures))


def vocab_of(traces):
    return 1 + max(max(*trace.prompt, *trace.answer, int(trace.tops.max())) for trace in traces)


def table_of(text):
    """`1:2.03,8:2.09` as a dict, smallest first."""
    pairs = [entry.split(":") for entry in text.split(",")]
    return dict(sorted((int(number), float(value)) for number, value in pairs))


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
    vocab, figures = vocab_of(traces), {}
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
    parser.add_argument("--live", help="let `auto` draft for so many answers at once, for example 1,8,32")
    parser.add_argument("--costs", default=COSTS, help="of --live: ms of a frame by rows")
    parser.add_argument("--gaps", default=GAPS, help="of --live: ms between frames with drafts, by live")
    parser.add_argument("--orders", type=int, default=3, help="of --live: orders of the answers")
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
    if args.live:
        args.live = [int(number) for number in args.live.split(",")]
        args.costs, args.gaps = table_of(args.costs), table_of(args.gaps)
        figures = simulate(traces, args)
        show_live(figures)
        print(json.dumps({"traces": args.traces.name, "costs": args.costs, "gaps": args.gaps} | figures))
        return
    figures = measure(traces, args)
    print(f"{len(traces)} answers, {sum(len(t.answer) for t in traces)} tokens, "
          f"{'fresh' if args.fresh else 'kept'}; tokens per frame\n")  # fmt: skip
    show(figures, args.nodes)
    print(json.dumps({"traces": args.traces.name, "fresh": args.fresh} | figures))


if __name__ == "__main__":
    main()

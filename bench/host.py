"""The host's time per frame with drafts, by part: what a frame waits for, and what runs beside it.

    python bench/host.py --traces traces.json.gz [--live 1,8,32] [--steps 600]
    python bench/host.py --traces traces.json.gz --model FOLDER

Recorded answers (see `bench/drafts.py`) are asked, so many at once, of all kinds in turn. Without a model
they are answered by a device that takes no time: a tiny engine on the CPU, whose frames give the recorded
tokens and candidates. Its clock goes by the frame times and gaps of `bench/drafts.py`, so that trees are as
large as on an H200. With a model, on CUDA, the engine is the real one and answers the recorded prompts.

Printed in microseconds, as the lower quartile of the frames that were follow-ups, which a busy machine
disturbs least. `gap` is the time from a frame's landing until the next one was launched; the parts under it
are what it consists of. `beside` is the rest of a step but for waiting, while the device computes. The last
line is JSON.
"""

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

from drafts import COSTS, GAPS, read
from samewise.config import EngineConfig
from samewise.draft.auto.auto import Auto
from samewise.draft.build import make_auto
from samewise.draft.native.drafter import NativeFollower
from samewise.engine import Engine
from samewise.execute.load import load
from samewise.schedule.scheduler import Scheduler
from samewise.testing import submit, tiny_engine
from samewise.types import Sampling
from samewise.verify.verifier import FrameInFlight, Verifier

TINY = {
    "vocab_size": 152064, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 4096,
}  # fmt: skip
SIZES = (1, 8, 16, 32, 64, 96, 128)
WARM_UP = 200
"""Steps before anything is counted."""


class Parts:
    """Seconds of calls, step by step. Methods are wrapped, so that the engine runs as it is."""

    def __init__(self):
        self.steps, self.step, self.free = [], defaultdict(float), 0.0

    def time(self, owner, name, label):
        """Time a method of a class. Seconds of the device that takes no time are left out."""
        method = getattr(owner, name)

        def timed(*args, **options):
            began, free = time.perf_counter(), self.free
            try:
                return method(*args, **options)
            finally:
                self.step[label] += time.perf_counter() - began - (self.free - free)

        setattr(owner, name, timed)

    def next_step(self):
        self.steps.append(self.step)
        self.step = defaultdict(float)

    def table(self):
        """Lower quartiles, in microseconds, of the steps that had a follow-up."""
        steps = [step for step in self.steps if "gap: C++" in step and "wait" in step]
        for step in steps:
            step["gap"] = step.pop("start") - step["wait"]
            step["beside"] = step["step"] - step["wait"] - step["gap"]
        labels = sorted({label for step in steps for label in step})
        return {label: float(np.percentile([s[label] for s in steps], 25) * 1e6) for label in labels}


class InstantDevice:
    """Gives the recorded tokens and candidates of a frame's rows in place of a model."""

    def __init__(self, engine, clock, parts, live):
        self.engine, self.clock, self.parts = engine, clock, parts
        self.traces, self.inputs = {}, None  # the trace of each request; the frame in flight
        runner, verifier = engine.runner, engine.verifier
        logits = torch.empty((runner.widest, 1), dtype=torch.bfloat16)
        runner.frame = lambda inputs: self.begin(inputs, logits)
        runner.store.move = nothing
        for size in runner.sizes:
            for keep in (False, True):
                verifier._greedy[size, keep] = self.answer
        wait = FrameInFlight._wait

        def wait_for_clock(flight):
            clock.pass_frame()
            return wait(flight)

        FrameInFlight._wait = wait_for_clock
        self.rows, self.seconds = (np.array(column) for column in zip(*pairs(COSTS), strict=True))
        self.gap = np.interp(live, *zip(*pairs(GAPS), strict=True))

    def begin(self, inputs, logits):
        self.inputs = inputs
        self.clock.now += self.gap * 1e-3
        return logits[: inputs.num_rows]

    def answer(self):
        began, inputs = time.perf_counter(), self.inputs
        outputs = self.engine.runner.frame_outputs.numpy()
        first_pages = inputs.rows.pages.numpy()[inputs.rows.page_start.numpy()]
        running = self.engine.scheduler._running
        traces = {seq.pages[0]: self.traces[seq_id] for seq_id, seq in running.items() if seq.pages}
        used = np.flatnonzero(inputs.rows.lengths.numpy())
        for row, position in zip(used, inputs.positions.numpy()[0][used], strict=True):
            tokens, tops = traces[first_pages[row]]
            outputs[row, 0], outputs[row, 2:] = tokens[position + 1], tops[position + 1]
        self.clock.frame = np.interp(len(used), self.rows, self.seconds) * 1e-3
        self.parts.free += time.perf_counter() - began

    def follow(self, seq_id, trace):
        """A request's recorded answer, and more than the rows of a tree behind it."""
        before, behind = len(trace.prompt), 80
        tops = np.concatenate([np.zeros((before, 8)), trace.tops, np.zeros((behind, 8))])
        self.traces[seq_id] = np.array([*trace.prompt, *trace.answer, *[0] * behind]), tops


class Clock:
    """Seconds that the instant device would have taken; those of a frame pass when it is waited for."""

    now = frame = 0.0

    def __call__(self):
        return self.now

    def pass_frame(self):
        self.now, self.frame = self.now + self.frame, 0.0


def nothing(*_):
    """What there is to do where nothing has to be done."""


def pairs(text):
    return [tuple(map(float, entry.split(":"))) for entry in text.split(",")]


def make_engine(args, live, parts):
    """The engine, and what has to be told of a request."""
    if args.model:
        settings = {"model": args.model, "proposer": "auto", "max_num_seqs": live}
        config = EngineConfig.of(
            enable_prefix_caching=False, max_model_len=4096, kv_memory="4GiB", **settings
        )
        return Engine(load(EngineConfig.of(model=args.model)), config), nothing
    clock = Clock()
    engine = tiny_engine(
        make_proposer=lambda given: make_auto(given, []), ahead=True, clock=clock, max_num_seqs=live,
        kv_memory=2**26, frame_rows=SIZES[-1], frame_sizes=SIZES, enable_prefix_caching=False, overrides=TINY,
    )  # fmt: skip
    return engine, InstantDevice(engine, clock, parts, live).follow


def measure(engine, follow, traces, live, parts, steps):
    """Frames, rows and tokens of the steps that count."""
    counters, num_live, asked = engine.scheduler.counters, 0, 0
    before = (0, 0, 0, 0)
    for i in range(WARM_UP + steps):
        while num_live < live:
            trace = traces[asked % len(traces)]
            # The first ones end one after another, not all at once.
            num = len(trace.answer) * (asked + 1) // live if asked < live else len(trace.answer)
            follow(submit(engine, trace.prompt, Sampling(), max_tokens=max(1, num)), trace)
            num_live, asked = num_live + 1, asked + 1
        deltas = engine.step()
        num_live -= sum(delta.finish is not None for delta in deltas)
        parts.next_step()
        if i + 1 == WARM_UP:
            parts.steps.clear()
            before = (counters.frames, counters.follow_ups, counters.rows, counters.output_tokens)
    after = (counters.frames, counters.follow_ups, counters.rows, counters.output_tokens)
    return [a - b for a, b in zip(after, before, strict=True)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--model")
    parser.add_argument("--live", default="1,8,32")
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()
    torch.set_num_threads(1)
    parts = Parts()
    for owner, name, label in (
        (Engine, "step", "step"), (Engine, "_start_follow_up", "start"),
        (Auto, "observe", "observe"), (Auto, "take_follow_up", "take drafts"),
        (FrameInFlight, "_wait", "wait"), (NativeFollower, "run", "gap: C++"),
        (Verifier, "start", "gap: pack and launch"), (FrameInFlight, "verdicts", "judge"),
        (Scheduler, "commit", "commit"), (Scheduler, "extend", "extend"),
        (Scheduler, "spans_following", "spans"), (Verifier, "launch", "launch sampling"),
        (Engine, "_account", "account"), (Engine, "_plan_follow_up", "plan"),
    ):  # fmt: skip
        parts.time(owner, name, label)
    traces = [trace for trace in read(args.traces) if len(trace.prompt) < 1000]
    results = {}
    for live in map(int, args.live.split(",")):
        parts.steps.clear()
        engine, follow = make_engine(args, live, parts)
        frames, follow_ups, rows, tokens = measure(engine, follow, traces, live, parts, args.steps)
        table = parts.table()
        print(f"\n{live} live: {frames} frames, {follow_ups} follow-ups, {rows / frames:.1f} rows and")
        print(f"{tokens / frames / live:.2f} tokens of each sequence per frame")
        for label in sorted(table, key=lambda label: -table[label]):
            print(f"  {label:24} {table[label]:8.1f}")
        results[live] = table
        del engine
    print(json.dumps({"host": results}))


if __name__ == "__main__":
    main()

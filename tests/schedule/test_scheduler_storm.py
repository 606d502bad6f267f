"""The Scheduler under random requests, aborts, ends and preemptions.

The page pool is so small that the scheduler also preempts by itself; guesses are right, wrong, and both.
"""

from typing import Any

from fake_engine import PAGE, STOP, VOCAB, FakeEngine, draft_with
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from samewise.schedule.limits import Limits
from samewise.types import Finish, Sampling

PREFIXES = ([1], [1, 2, 3], [0] * 9, [1, 2, 3, 4, 0, 1, 2, 3, 1])  # prompts begin with one of these


class Storm(RuleBasedStateMachine):
    """Random operations on a FakeEngine; after each, pages and outputs are checked."""

    def __init__(self) -> None:
        super().__init__()
        self.engine: FakeEngine | None = None

    @precondition(lambda self: self.engine is None)
    @rule(
        num_pages=st.integers(8, 14),
        max_rows=st.integers(1, 12),
        max_num_seqs=st.integers(1, 5),
        caching=st.booleans(),
        drafting=st.booleans(),
    )
    def build(self, num_pages: int, max_rows: int, max_num_seqs: int, caching: bool, drafting: bool) -> None:
        self.ways = ("drafting", "lazy", "eager") if drafting else ("chained", "chained", "eager")
        self.engine = FakeEngine(
            Limits(
                num_pages,
                PAGE,
                max_rows,
                max_num_seqs,
                max_model_len=26,
                max_draft=5,
                prefix_caching=caching,
            )
        )

    @precondition(lambda self: self.engine is not None and len(self.engine.outputs) < 12)
    @rule(
        head=st.sampled_from(PREFIXES),
        tail=st.lists(st.integers(0, VOCAB - 1), max_size=8),
        max_tokens=st.integers(0, 12),
        verify=st.sampled_from([True, True, True, False]),
        stops=st.booleans(),
        kind=st.sampled_from(["plain", "plain", "plain", "prompt_logprobs", "score"]),
        salt=st.sampled_from([b"", b"", b"other"]),
        data=st.data(),
    )
    def add(
        self,
        head: list[int],
        tail: list[int],
        max_tokens: int,
        verify: bool,
        stops: bool,
        kind: str,
        salt: bytes,
        data: st.DataObject,
    ) -> None:
        assert self.engine is not None
        prompt = head + tail
        fields: dict[str, Any] = {"verify": verify, "salt": salt}
        fields["sampling"] = Sampling(stop_ids=frozenset({STOP} if stops else ()))
        if kind == "prompt_logprobs":
            fields["prompt_logprobs"] = 0
        if kind == "score":
            fields["score_from"] = data.draw(st.integers(1, len(prompt)))
            max_tokens = 0
        leaders = [i for i, output in self.engine.outputs.items() if output.request.prompt == tuple(prompt)]
        if leaders:
            fields["leader"] = data.draw(st.sampled_from([None, *leaders]))
        self.engine.add(prompt, max_tokens, **fields)

    @precondition(lambda self: self.engine is not None)
    @rule(right=st.lists(st.booleans(), min_size=5, max_size=5), way=st.integers(0, 2))
    def step(self, right: list[bool], way: int) -> None:
        assert self.engine is not None
        how = self.ways[way]
        self.engine.step(draft_with(right) if how == "drafting" else None, how)
        self.engine.check_kv_lens()

    @precondition(lambda self: self.engine is not None and self.engine.outputs)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        assert self.engine is not None
        request_id = data.draw(st.sampled_from(sorted(self.engine.outputs)))
        unfinished = self.engine.outputs[request_id].finish is None and request_id not in self.engine.dropped
        delta = self.engine.scheduler.abort(request_id)
        assert (delta is not None) == unfinished
        if delta is not None:
            assert delta.finish is Finish.ABORT
            self.engine.dropped.add(request_id)

    @precondition(lambda self: self.engine is not None and self.engine.scheduler.num_running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        assert self.engine is not None
        request_id = data.draw(st.sampled_from(self.engine.scheduler.running_ids()))
        self.engine.scheduler.end(request_id)
        self.engine.dropped.add(request_id)

    @precondition(lambda self: self.engine is not None and self.engine.scheduler.num_running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        assert self.engine is not None
        self.engine.land()  # as Engine.preempt does
        if not self.engine.scheduler.num_running:
            return
        request_id = data.draw(st.sampled_from(self.engine.scheduler.running_ids()))
        assert self.engine.scheduler.preempt(request_id)
        self.engine.kv_lens.pop(request_id, None)

    @invariant()
    def pages_and_outputs_are_consistent(self) -> None:
        if self.engine is not None:
            self.engine.scheduler.check()
            self.engine.check_outputs()

    def teardown(self) -> None:
        if self.engine is not None:
            how = self.ways[0]
            propose = draft_with([True, True, False, True, True]) if how == "drafting" else None
            self.engine.drain(propose, how)


Storm.TestCase.settings = settings(
    max_examples=250, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestStorm = Storm.TestCase

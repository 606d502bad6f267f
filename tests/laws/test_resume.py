"""An answer that one engine began goes on in another, at any token, to the same bits.

The second engine is given what the caller has as output (`Request.output`, `num_scores`).
"""

from dataclasses import replace

import pytest
from law_helpers import CASES, Case, FullTranscript, random_prompt, run_cases, sampled
from law_proposers import jitter

from samewise.testing import submit
from samewise.types import Grammar, Sampling

MORE = (
    *CASES,
    Case("min-tokens-9", random_prompt(9, 4), Sampling(min_tokens=8, stop_ids=frozenset(range(200))), 16),
    Case("bad-words-9", random_prompt(9, 5), sampled(11, bad_words=((65,), (66, 67))), 16),
    Case("bias-9", random_prompt(9, 6), sampled(12, logit_bias=((70, 3.0), (71, -100.0))), 16),
    Case("second-of-n", random_prompt(9, 7), sampled(13, index=1), 16),
    Case("grammar", random_prompt(9, 8), sampled(14, grammar=Grammar.json_object()), 16),
    Case("unverified", random_prompt(9, 9), sampled(15), 8, verify=False),
)


class Resumed(Case):
    """A case of which the caller has the first tokens."""

    __slots__ = ("has",)

    def __init__(self, case: Case, has: FullTranscript, num_tokens: int) -> None:
        super().__init__(**{name: getattr(case, name) for name in Case.__dataclass_fields__})
        object.__setattr__(self, "has", (tuple(has.tokens[:num_tokens]), len(has.scores)))

    def add(self, engine):
        output, num_scores = self.has
        return submit(
            engine, self.prompt, self.sampling, max_tokens=self.max_tokens, verify=self.verify,
            prompt_logprobs=self.prompt_logprobs, output=output, num_scores=num_scores,
        )  # fmt: skip


def joined(has, num_tokens, rest):
    """The whole transcript of an answer whose first tokens come from another engine."""
    whole = FullTranscript()
    whole.tokens = has.tokens[:num_tokens] + rest.tokens
    whole.logprobs = has.logprobs[:num_tokens] + rest.logprobs
    whole.tops = has.tops[:num_tokens] + rest.tops
    whole.ranks = has.ranks[:num_tokens] + rest.ranks
    whole.scores, whole.score_tops = has.scores + rest.scores, has.score_tops + rest.score_tops
    whole.score_ranks = has.score_ranks + rest.score_ranks
    whole.finish, whole.stop_id = rest.finish, rest.stop_id
    return whole


@pytest.mark.parametrize("num_tokens", [1, 2, 7])
def test_an_answer_goes_on_in_another_engine(basic, num_tokens):
    cases = [case for case in MORE if case.max_tokens > num_tokens]
    wanted = run_cases(basic.engine(), cases)
    going_on = [(case, has) for case, has in zip(cases, wanted, strict=True) if len(has.tokens) > num_tokens]
    assert len(going_on) >= len(cases) - 4
    resumed = [Resumed(case, has, num_tokens) for case, has in going_on]
    rest = run_cases(basic.engine(jitter), resumed)
    for (case, has), after in zip(going_on, rest, strict=True):
        assert joined(has, num_tokens, after) == has, case.name


def test_what_is_left_of_the_prompts_scores_is_scored(basic):
    case = replace(CASES[-1], prompt_logprobs=2, max_tokens=5)
    (wanted,) = run_cases(basic.engine(), [case])
    engine = basic.engine()
    submit(engine, case.prompt, case.sampling, max_tokens=case.max_tokens, prompt_logprobs=2, num_scores=20)
    rest = FullTranscript()
    while not engine.idle:
        for delta in engine.step():
            rest.take(delta)
    assert rest.scores == wanted.scores[20:]
    assert rest.tokens == wanted.tokens

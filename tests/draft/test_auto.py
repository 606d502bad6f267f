"""Pacing: rows are bought where they pay, drafters are used where they pay, and the clock is handed in."""

import subprocess
import sys
from array import array

import pytest

from samewise.draft.auto.auto import EXPLORE, Auto
from samewise.draft.auto.idle_policy import FRAMES
from samewise.draft.base import Drafter
from samewise.draft.cost_model import FrameCosts
from samewise.draft.ngram import Heard, Match, Ngram
from samewise.types import Ask, Proposal, Sampling, Verdict

REPEATING = [1, 2, 3, 4] * 6
SHORTLY = [5, 1, 2, 3, 4, *range(20, 40), 1, 2]  # two tokens of it were seen before
PLAIN = list(range(100, 120))


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Slow(Drafter):
    """A drafter whose every pass takes so long."""

    name = "slow"

    def __init__(self, clock, seconds):
        self.clock, self.seconds, self.passes = clock, seconds, 0

    def propose(self, asks):
        self.passes += 1
        self.clock.now += self.seconds
        return [Proposal(ask.seq_id, (7,), drafter=self.name, more=True) for ask in asks]


def ask(seq_id, tokens, room=16, draft=()):
    return Ask(seq_id, tokens, 4, list(draft), len(tokens) - 1, array("i"), Sampling(), room)


def frames(base=0.03, each=0.002, sizes=tuple(range(1, 65))):
    made = FrameCosts(sizes)
    for rows in sizes:
        made.observe(rows, base + each * rows)
    return made


def auto(costs=None, drafters=(), clock=None, **settings):
    return Auto(Ngram(), list(drafters), costs or frames(), clock or Clock(), **settings)


def verdict(seq_id, guessed, accepted, drafter):
    return Verdict(seq_id, (1,) * (accepted + 1), (), (), 9, guessed, accepted, drafter=drafter)


def run(paced, steps, accepted, drafter="slow"):
    """Rounds of one sequence whose drafts are accepted so far; returns the length of each draft."""
    lengths, draft = [], []
    for _ in range(steps):
        proposals = paced.propose([ask(0, PLAIN, draft=draft)])
        for proposal in proposals:
            draft += proposal.tokens
        if not any(proposal.more for proposal in proposals):
            right = min(accepted, len(draft))
            paced.observe([verdict(0, len(draft), right, drafter)])
            lengths.append(len(draft))
            draft = []
    return lengths


def test_repeating_text_is_guessed_and_other_text_is_not():
    paced = auto()
    proposals = paced.propose([ask(0, REPEATING), ask(1, PLAIN)])
    assert [p.seq_id for p in proposals] == [0]
    assert proposals[0].tokens == ((1, 2, 3, 4) * 4)[: len(proposals[0].tokens)]
    assert proposals[0].drafter == "ngram"


def test_rows_are_bought_while_they_pay():
    def bought(each):
        (proposal,) = auto(frames(each=each)).propose([ask(0, SHORTLY)]) or [Proposal(0, ())]
        return len(proposal.tokens)

    assert bought(0.0) > bought(0.004) > 0
    assert bought(0.5) == 0


def test_guesses_that_fail_are_not_bought_again():
    paced = auto(frames(each=0.006))
    for _ in range(30):
        for proposal in paced.propose([ask(0, REPEATING)]):
            paced.observe([verdict(0, len(proposal.tokens), 0, "ngram")])
    assert paced.propose([ask(0, REPEATING)]) == []


def test_guesses_that_succeed_grow():
    paced = auto(frames(each=0.006))
    first = len(paced.propose([ask(0, SHORTLY)])[0].tokens)
    for _ in range(10):
        (proposal,) = paced.propose([ask(0, SHORTLY)])
        paced.observe([verdict(0, len(proposal.tokens), len(proposal.tokens), "ngram")])
    assert len(paced.propose([ask(0, SHORTLY)])[0].tokens) > first


def test_each_right_guess_makes_the_next_likelier():
    """A match that has held for some tokens is believed further than one that begins."""
    paced = auto(frames(each=0.006))
    (short,), (long,) = (paced.propose([ask(i, text)]) for i, text in enumerate((SHORTLY, REPEATING)))
    assert len(long.tokens) > 2 * len(short.tokens)


def test_a_sequence_with_bad_luck_is_believed_less_than_the_others():
    paced = auto(frames(each=0.002))
    for _ in range(4):
        (proposal,) = paced.propose([ask(0, SHORTLY)]) or [Proposal(0, (1,))]
        paced.observe([verdict(0, len(proposal.tokens), 0, "ngram")])
    unlucky, fresh = (sum(len(p.tokens) for p in paced.propose([ask(i, SHORTLY)])) for i in (0, 1))
    assert unlucky < fresh


def test_rows_that_would_be_padding_cost_nothing():
    costs = FrameCosts((128,))
    costs.observe(1, 0.006)
    proposals = auto(costs).propose([ask(i, REPEATING) for i in range(4)])
    assert all(len(proposal.tokens) >= 3 for proposal in proposals)


def test_a_cheap_and_good_drafter_is_used_and_goes_far():
    clock = Clock()
    paced = auto(drafters=[Slow(clock, 0.004)], clock=clock)
    lengths = run(paced, 400, accepted=16)
    assert lengths[-1] >= 8
    assert paced.stats()["auto"]["decisions"]["slow"] > 10


@pytest.mark.parametrize(("seconds", "accepted"), [(0.2, 16), (0.02, 0)], ids=["dear", "wrong"])
def test_a_drafter_that_does_not_pay_is_dropped_and_hardly_tried_again(seconds, accepted):
    clock = Clock()
    drafter = Slow(clock, seconds)
    paced = auto(drafters=[drafter], clock=clock)
    run(paced, 60, accepted)
    before = drafter.passes
    lengths = run(paced, EXPLORE // 2, accepted)
    assert drafter.passes == before
    assert set(lengths) == {0}


def test_a_drafter_that_got_better_is_found_again():
    clock = Clock()
    drafter = Slow(clock, 0.004)
    paced = auto(drafters=[drafter], clock=clock)
    run(paced, 100, accepted=0)
    before = drafter.passes
    run(paced, 4 * EXPLORE, accepted=16)
    assert drafter.passes > before + 50


def test_a_first_pass_that_is_slow_is_forgiven():
    clock = Clock()
    drafter = Slow(clock, 0.001)
    paced = auto(drafters=[drafter], clock=clock)
    clock.now += 0.3
    propose, first = drafter.propose, [True]

    def slow_once(asks):
        clock.now += 0.3 if first else 0.0
        first.clear()
        return propose(asks)

    drafter.propose = slow_once
    run(paced, 200, accepted=16)
    assert drafter.passes > 100


def test_rows_behind_a_border_are_bought_together():
    """Eight sequences fill a frame of eight: the first guess costs a frame of 32, those behind it nothing."""
    paced = auto(frames(base=0.001, each=0.000_02, sizes=(8, 32)))
    found = paced.propose([ask(i, REPEATING) for i in range(8)])
    assert (8 + sum(len(proposal.tokens) for proposal in found)) % 32 == 0
    alone = auto(frames(base=0.001, each=0.000_02, sizes=(8, 32)))
    assert alone.propose([ask(0, SHORTLY), *(ask(i, PLAIN) for i in range(1, 8))]) == []


def test_it_rests_only_where_resting_pays():
    for restful in (True, False):
        paced = auto(restful=restful)
        paced.propose([ask(0, PLAIN)])
        assert paced.quiet is restful
        for _ in range(FRAMES):
            paced.observe([])
        assert not paced.quiet


def test_nobody_rests_while_guesses_wait_for_their_frame():
    paced = auto(restful=True)
    assert paced.propose([ask(0, REPEATING)])
    assert paced.propose([ask(1, PLAIN)]) == []
    assert not paced.quiet
    paced.observe([verdict(0, 2, 1, "ngram")])
    assert paced.quiet


class Machine:
    """One sequence on a device beside the host: a frame takes 1 ms, waiting for guesses another 0.4."""

    FRAME, ASKING, ROW = 1e-3, 0.4e-3, 1e-6

    def __init__(self, text, *, right=True, live=1, ngram=None, explain=False):
        self.clock, self.right, self.live = Clock(), right, live
        costs = frames(self.FRAME, self.ROW)
        self.paced = Auto(ngram or Ngram(), [], costs, self.clock, restful=True, explain=explain)
        self.text, self.said = text, 8
        self.asked = self.frames = 0

    def run(self, until):
        """Say the text up to there."""
        flying = ()  # guesses in the frame in flight
        while self.said < until:
            self.frames += 1
            self.clock.now += self.FRAME + self.ROW * len(flying)
            agreed = [a == b for a, b in zip(flying, self.text[self.said :], strict=False)]
            right = [*agreed, False].index(False) if self.right else 0
            now = self.text[self.said : self.said + 1 + right]
            told = Verdict(
                0, tuple(now), (0.0,) * len(now), (), self.said + right, len(flying), right, drafter="ngram"
            )
            self.said += len(now)
            was_quiet = self.paced.quiet
            self.paced.observe([told._replace(seq_id=i) for i in range(self.live)])
            flying = ()
            if was_quiet:
                continue  # the next frame is on its way
            self.clock.now += self.ASKING
            self.asked += 1
            found = self.paced.propose([ask(i, self.text[: self.said]) for i in range(self.live)])
            flying = found[0].tokens if found else ()

    @property
    def pace(self):
        """Tokens per frame's time."""
        return (self.said - 8) / (self.clock.now / self.FRAME)


NOTHING_TWICE = list(range(1000, 3000))


def test_where_nothing_repeats_hardly_anybody_asks():
    machine = Machine(NOTHING_TWICE)
    machine.run(1500)
    assert machine.asked < 40
    assert machine.pace > 0.98


def test_a_repetition_wakes_it_at_once():
    text = NOTHING_TWICE[:400] + NOTHING_TWICE[100:300]
    machine = Machine(text)
    machine.run(400)
    asked, began = machine.asked, machine.clock.now
    machine.run(600)
    assert machine.asked > asked
    assert machine.clock.now - began < 40 * machine.FRAME  # 200 tokens


class Liar(Ngram):
    """Finds long matches everywhere."""

    def find(self, ask):
        return Match((1,) * 8, 8, shared=False)

    def listen(self, seq_id, tokens, length):
        return Heard(8, None)


def test_what_never_comes_true_is_soon_left_alone():
    """Matches that promise much, and always lie."""
    machine = Machine(NOTHING_TWICE, right=False, ngram=Liar())
    machine.run(1500)
    assert machine.asked < 200
    assert machine.pace > 0.93


def test_what_is_heard_teaches_without_being_asked():
    """Two tokens that were seen before, then always news: that such matches lie costs nothing to learn."""
    machine = Machine([n for i in range(300) for n in (5, 6, 1000 + i)], right=False)
    machine.run(800)
    asked = machine.asked
    learned = machine.paced.stats()["auto"]["match_acceptance"][2]
    assert learned < 0.1
    machine.run(850)
    assert machine.asked - asked <= 1


def test_one_token_too_late_is_too_late():
    """Of a match only the next token is ever right, and that is on its way already when it is heard."""
    machine = Machine([n for i in range(300) for n in (5, 6, 7, 1000 + i)])
    machine.run(400)
    asked = machine.asked
    machine.run(1100)
    assert machine.asked - asked < 20
    assert machine.pace > 0.97


def test_short_matches_that_come_to_nothing_are_not_worth_asking():
    text = [n for i in range(300) for n in (5, 6, 1000 + i)]  # two tokens that were seen before, then news
    machine = Machine(text, right=False)
    machine.run(800)
    assert machine.pace > 0.9


def test_one_disturbed_frame_does_not_put_it_to_sleep():
    machine = Machine([1, 2, 3, 4, 5, 6, 7, 8] * 300)
    machine.run(400)
    machine.clock.now += 1.0  # somebody else was at work
    asked, frames_before, said = machine.asked, machine.frames, machine.said
    machine.run(800)
    assert machine.asked - asked > 0.8 * (machine.frames - frames_before)
    assert machine.said - said > 8 * (machine.frames - frames_before)


class Late(Slow):
    """A drafter that has to read for a while before it can guess."""

    def __init__(self, clock, calls):
        super().__init__(clock, 0.000_1)
        self.calls = calls

    def propose(self, asks):
        self.calls -= 1
        return [] if self.calls >= 0 else super().propose(asks)


@pytest.mark.parametrize(("calls", "reached"), [(20, True), (10**6, False)])
def test_a_drafter_that_reads_first_is_waited_for_but_not_for_ever(calls, reached):
    clock = Clock()
    late = Late(clock, calls)
    paced = Auto(Ngram(), [late], frames(0.001, 1e-6), clock, restful=True)
    asked, said = 0, list(PLAIN)
    for token in range(1000, 1400):
        clock.now += 0.001
        was_quiet = paced.quiet
        said.append(token)
        paced.observe([verdict(0, 0, 0, "")._replace(tokens=(token,))])
        if not was_quiet:
            asked += 1
            paced.propose([ask(0, said)])
    assert (late.passes > 0) is reached
    assert reached or asked < 60


def test_decisions_are_told(caplog):
    paced = auto(explain=True)
    with caplog.at_level("INFO", "samewise.auto"):
        paced.propose([ask(0, REPEATING)])
        paced.propose([ask(1, PLAIN)])
    assert "guesses bought" in caplog.text
    assert "sequences was seen before" in caplog.text
    told = paced.stats()["auto"]
    assert told["decisions"] == {"ngram": 1, "none": 1}
    assert len(told["match_acceptance"]) == 13
    assert told["rest"] is None


def test_trials_and_rests_are_told_too(caplog):
    clock = Clock()
    paced = auto(drafters=[Slow(clock, 0.001)], clock=clock, explain=True)
    with caplog.at_level("INFO", "samewise.auto"):
        run(paced, 3, 0)
        resting = Machine(NOTHING_TWICE[:60] + [7, 8, 9] * 30, explain=True)
        resting.run(140)
    for told in ("slow is tried for 1 sequences", "nothing to guess; resting", "awake again; "):
        assert told in caplog.text
    rest = resting.paced.stats()["auto"]["rest"]
    assert rest["rests"] > 0
    assert rest["calls"] > 0
    assert rest["price_seconds"] == pytest.approx(Machine.ASKING, rel=0.2)


def test_who_keeps_no_log_is_told_on_stderr():
    code = (
        "import logging; from samewise.draft.auto.auto import Auto, log; "
        "Auto(None, [], None, None); assert not log.handlers; "
        "Auto(None, [], None, None, explain=True); log.info('heard')"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stderr.strip() == "heard"


def test_forgetting_leaves_nothing():
    paced = auto()
    paced.propose([ask(5, REPEATING)])
    paced.observe([verdict(5, 2, 1, "ngram")])
    paced.forget(5)
    assert not (paced._by_seq)
    assert not (paced._matched)
    assert not (paced._target)
    assert not (paced._luck)
    assert not (paced._pending)
    assert not (paced._ngram._texts)
    assert not (paced._ngram._asked)
    assert not (paced._ngram._foretold)

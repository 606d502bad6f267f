"""The proposer interface: defaults do nothing, and a fallback passes everything on."""

from array import array

from samewise.draft.base import Drafter, Fallback, NoDrafts, Proposer
from samewise.types import Ask, Proposal, Sampling


class Minimal(Proposer):
    """Overrides nothing."""

    name = "minimal"


class Recorder(Proposer):
    """Records every call; drafts `token` for the sequences in `serves`."""

    def __init__(self, name, token, serves):
        self.name, self._token, self._serves, self.calls = name, token, serves, []

    def propose(self, asks):
        self.calls.append(("propose", [ask.seq_id for ask in asks]))
        return [Proposal(ask.seq_id, (self._token,)) for ask in asks if ask.seq_id in self._serves]

    def observe(self, verdicts):
        self.calls.append(("observe", verdicts))

    def forget(self, seq_id):
        self.calls.append(("forget", seq_id))

    def meet(self, asks):
        self.calls.append(("meet", asks))

    def warm(self, max_num_seqs):
        self.calls.append(("warm", max_num_seqs))

    def renew(self, contract_id):
        self.calls.append(("renew", contract_id))

    def stats(self):
        return {self.name: {"token": self._token}}


def ask(seq_id, draft=()):
    return Ask(seq_id, [1, 2], 1, list(draft), 1, array("i"), Sampling(), 4)


def test_every_method_has_a_default_that_does_nothing():
    proposer = Minimal()
    proposer.observe([])
    proposer.forget(0)
    proposer.meet([])
    proposer.warm(8)
    proposer.renew("sw-0")
    assert (proposer.quiet, proposer.propose([ask(0)]), proposer.stats()) == (False, [], {})


def test_a_drafter_is_ready_and_unchanged_by_default():
    drafter = Drafter()
    drafter.on_step([ask(0)])
    assert (drafter.ready, drafter.revision) == (True, 0)


def test_no_drafts_is_always_quiet():
    assert NoDrafts().quiet
    assert NoDrafts().propose([ask(0)]) == []


def test_the_first_member_with_a_draft_drafts():
    fallback = Fallback([Recorder("a", 5, {0}), Recorder("b", 6, {0, 1})])
    assert fallback.name == "a+b"
    proposals = fallback.propose([ask(0), ask(1), ask(2)])
    assert [(p.seq_id, p.tokens) for p in proposals] == [(0, (5,)), (1, (6,))]


def test_a_draft_under_way_goes_only_to_the_member_that_began_it():
    first, second = Recorder("a", 5, {0}), Recorder("b", 6, {1})
    fallback = Fallback([first, second])
    fallback.propose([ask(0), ask(1)])
    fallback.propose([ask(0, draft=[5]), ask(1, draft=[6])])
    assert [call for call in first.calls if call[0] == "propose"][-1] == ("propose", [0])
    assert [call for call in second.calls if call[0] == "propose"][-1] == ("propose", [1])


def test_a_fallback_passes_every_call_to_all_members():
    members = [Recorder("a", 5, set()), Recorder("b", 6, set())]
    fallback = Fallback(members)
    fallback.observe([])
    fallback.forget(3)
    fallback.meet([])
    fallback.warm(8)
    fallback.renew("sw-1")
    expected = [("observe", []), ("forget", 3), ("meet", []), ("warm", 8), ("renew", "sw-1")]
    assert [member.calls for member in members] == [expected, expected]
    assert fallback.stats() == {"a": {"token": 5}, "b": {"token": 6}}

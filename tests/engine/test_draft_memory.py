"""What proposers of an engine keep of requests: `share=False` keeps nothing, new weights drop everything."""

import pytest

from samewise.engine import Engine
from samewise.testing import run, submit, tiny_engine
from samewise.types import Sampling

PROMPT = [7, 8, 9] * 12
NAMES = {"ngram": "ngram", "recycle": "recycle", "auto": "tree"}


def answer(engine: Engine, *, share: bool, salt: bytes = b"") -> None:
    submit(engine, PROMPT, Sampling(), max_tokens=30, share=share, salt=salt)
    while not engine.idle:
        engine.step()


def memory(engine: Engine, proposer: str) -> tuple[int, int, int]:
    report = engine.stats()[NAMES[proposer]]
    return report["table_bytes"], report["store_bytes"], report["sequence_bytes"]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("proposer", NAMES)
def test_nothing_is_kept_of_a_request_that_does_not_share(proposer: str, ahead: bool) -> None:
    engine = tiny_engine(proposer=proposer, ahead=ahead)
    answer(engine, share=False)
    assert engine.stats()["drafts"] > 0  # it drafts from itself
    assert memory(engine, proposer) == (0, 0, 0)
    answer(engine, share=True)
    tables, store, sequences = memory(engine, proposer)
    assert (tables > 0) == (proposer != "ngram")
    assert (store > 0) == (proposer != "recycle")
    assert sequences == 0


@pytest.mark.parametrize("proposer", NAMES)
def test_new_weights_drop_what_drafts_were_made_of(proposer: str) -> None:
    engine = tiny_engine(proposer=proposer)
    answer(engine, share=True)
    assert sum(memory(engine, proposer)) > 0
    engine.update_weights({})
    assert memory(engine, proposer) == (0, 0, 0)
    ask = [(PROMPT, Sampling(), 12)]
    assert run(engine, ask) == run(tiny_engine(proposer="none"), ask)

"""`samewise demo`."""

import io

from rich.console import Console

from samewise.cli.demo import SITUATIONS, show


def test_verified_decoding_gives_one_digest_in_every_situation(llm):
    text = io.StringIO()
    assert show(Console(file=text, width=160), lambda **_: llm, max_tokens=6)
    assert "verified 1" in text.getvalue()
    assert all(situation in text.getvalue() for situation in SITUATIONS)
    llm.engine.check()
    assert llm.engine.idle

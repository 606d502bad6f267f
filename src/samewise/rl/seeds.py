"""Seeds of sampled answers: another one for every answer of a run, and the same when the run is repeated."""

import hashlib


def answer_seed(*parts: int) -> int:
    """A seed from numbers that name an answer, such as the run's seed, the step and the answer's number.

    53 bits of a hash: every JSON reader keeps them exactly.
    """
    digest = hashlib.sha256(" ".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 11


__all__ = ["answer_seed"]

"""How likely a candidate is the next token, learned online from verified frames.

A source names candidates, each with a class: a suffix match by length, share and count; a token of the
caller's prediction by how many tokens before it agreed; a recycled candidate or a runner-up by its rank. A
candidate's log-odds are a sum: a weight for the context, one for the class under the first source that names
it, and one for each source that names it again, which adds less than it would alone. The weights are a
logistic regression by Adagrad. Numbers in, numbers out. Host only.
"""

from __future__ import annotations

from collections.abc import Container
from math import exp, sqrt

from samewise.draft.recycle import WIDTH
from samewise.draft.suffix_counts import MAX_LENGTH, MAX_TOTAL, NUM_MATCH_CLASSES, NUM_SHARES, Named
from samewise.draft.tuning import DEFAULTS, EstimateTuning

MAX_DISTANCE = 4
"""Positions after its row at which a runner-up is still a candidate: 1 to this. Says where weights lie, so it
is no tuning; set by hand."""
_NUM_LENGTHS = MAX_LENGTH + 1

# A source is the index of the weight of its class 0.
OWN = 2 * _NUM_LENGTHS * _NUM_LENGTHS
"""The request's own text."""
STORED = OWN + NUM_MATCH_CLASSES
"""Earlier texts."""
RECYCLED = STORED + NUM_MATCH_CLASSES
"""The row that last followed the same token."""
RUNNERS_UP = tuple(RECYCLED + WIDTH * (1 + distance) for distance in range(MAX_DISTANCE))
"""A committed row one position back, two positions back, ..."""
PREDICTED = RECYCLED + WIDTH * (1 + MAX_DISTANCE)
"""The caller's prediction; the class is the number of tokens that agreed, at most MAX_LENGTH."""
OCCURRED = PREDICTED + _NUM_LENGTHS
"""The weight of a token that occurs in the own text."""
AGAIN = OCCURRED + 1
"""Added to an index where an earlier source named the token."""


def context_class(own_length: int, stored_length: int, *, recycled: bool) -> int:
    """Of a context: the lengths of its matches, and whether its last token has recycled candidates."""
    own, stored = min(own_length, MAX_LENGTH), min(stored_length, MAX_LENGTH)
    return (own * _NUM_LENGTHS + stored) * 2 + recycled


def chance(log_odds: float) -> float:
    """The probability of these log-odds."""
    return 1.0 / (1.0 + exp(-log_odds)) if log_odds > -30.0 else 0.0


def first_weights() -> list[float]:
    """The weights before anything was learned, in log-odds.

    Rounded from what was learned on text of SmolLM2-135M and Qwen2.5-Coder-1.5B; a few hundred frames later
    they matter little. Those of predictions are set by hand: a prediction is believed until it fails.
    """
    weights = [-2.5] * OWN
    for least in (0.0, -1.0):  # an earlier text tells less than the own one
        for i in range(NUM_MATCH_CLASSES):
            length, share = divmod(i // MAX_TOTAL, NUM_SHARES)
            certain = share == NUM_SHARES - 1
            weights.append(least + (0.6 * length if certain else 0.5 * share - 1.8))
    for source in range(1 + MAX_DISTANCE):
        first, slope = (-0.8, -0.3) if not source else (-2.0, -0.2)
        weights += [first + slope * rank for rank in range(WIDTH)]
    weights += [3.0 + 0.4 * agreed for agreed in range(_NUM_LENGTHS)]
    return [*weights, 0.7, *[0.5] * AGAIN]


class Estimates:
    """The weights. One owner; kept across requests."""

    def __init__(self, tuning: EstimateTuning = DEFAULTS.trees.estimates) -> None:
        self._tuning = tuning
        self.weights = first_weights()
        self._squares = [tuning.first_squares] * (2 * AGAIN)

    def rank(self, context: int, named: list[Named], occurred: Container[int]) -> list[tuple[float, int]]:
        """(log-odds, token) of all candidates, most probable first, of equals the higher token.

        `occurred`: the tokens of the own text.
        """
        weights = self.weights
        odds: dict[int, float] = {}
        base, get = weights[context], odds.get
        for source, tokens, classes in named:
            again = source + AGAIN
            for token, kind in zip(tokens, classes, strict=False):
                known = get(token)
                odds[token] = (
                    base + weights[source + kind] if known is None else known + weights[again + kind]
                )
        more = weights[OCCURRED]
        ranked = [
            (v + more, token) if token in occurred else (v, token) for token, v in odds.items() if token >= 0
        ]
        ranked.sort(reverse=True)
        return ranked

    def learn(self, context: int, named: list[Named], occurred: Container[int], truth: int) -> None:
        """Move the weights of each candidate towards what came: `truth` was the next token."""
        used: dict[int, list[int]] = {}
        for source, tokens, classes in named:
            for token, kind in zip(tokens, classes, strict=False):
                if token in used:
                    used[token].append(source + AGAIN + kind)
                else:
                    used[token] = [context, source + kind]
        used.pop(-1, None)
        weights, squares, tuning = self.weights, self._squares, self._tuning
        step, most = tuning.step, tuning.max_squares
        for token, indices in used.items():
            if token in occurred:
                indices.append(OCCURRED)
            odds = 0.0
            for i in indices:  # one after another, as the native drafter does; sum() would round otherwise
                odds += weights[i]
            error = (token == truth) - chance(odds)
            for i in indices:
                squares[i] = total = min(squares[i] + error * error, most)
                weights[i] += step * error / sqrt(total)


__all__ = [
    "AGAIN",
    "MAX_DISTANCE",
    "OCCURRED",
    "OWN",
    "PREDICTED",
    "RECYCLED",
    "RUNNERS_UP",
    "STORED",
    "Estimates",
    "chance",
    "context_class",
    "first_weights",
]

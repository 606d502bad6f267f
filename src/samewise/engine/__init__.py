"""The engine: one loop that admits, proposes, verifies and commits. It knows token ids and no text.

Holds: engine (the loop, requests, weights); recovery (calls that were cut short); assemble (builds the
parts); certify (probe and contract); weights (replacing them); stats; frame_log (the last frames' use).
State: an Engine owns its Scheduler, its proposer and the frame in flight; one thread owns an Engine.
Imports: text (the grammar library's version), verify, draft, schedule, execute and what they import.
"""

from samewise.engine.engine import Engine, build

__all__ = ["Engine", "build"]

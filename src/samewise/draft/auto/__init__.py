"""`auto`: measure frames, drafters and acceptance, and draft only where that makes tokens come faster.

Holds: auto (the proposer), drafters (which drafter that runs a model is used, and how far), idle_policy (when
to pause), explain (the log of decisions).
State: acceptance and cost estimates, owned by the Auto proposer.
Imports: draft.base, draft.tree_proposer, draft.tree, draft.cost_model, draft.tuning, types.
"""

"""`skip`, SWIFT: the target model drafts for itself with some of its sublayers skipped.

Holds: skip (the proposer). Phase 1, context-based layer-set optimisation: search (which sets to try next),
recent_text, scoring_passes and score_layer_set (how good a set is), optimiser and budget (when to search).
Phase 2, confidence-aware acceleration: pacing and confidence. Shared: pricing (costs), active_set,
layer_set_store (on disk), timeline.
State: the Skip proposer owns the search, the set in use and the estimates.
Imports: draft.base, draft.fast_passes, draft.cost_model, draft.tuning, execute, model (layer views).
"""

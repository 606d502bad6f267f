"""Proposers: what drafts the tokens that a frame then verifies.

Holds: base the proposer interface; model SpecDec's draft model, by model_reader, model_passes and
model_pacing; decode LLM-42's fast path, by fast_passes and quantized copies; skip/ SWIFT; tree_proposer the
proposers ngram and recycle and the trees of auto, grown by native/ or tree_drafter from recycle,
suffix_counts and estimates as tree says; auto/ the choice among them; cost_model measured costs and
acceptance; tuning every hand-set constant; build makes the proposer that a configuration names.
State: each proposer owns what it knows of its sequences; the engine owns the proposer.
Imports: execute and the rooms below it, follow_up; never verify or schedule.
"""

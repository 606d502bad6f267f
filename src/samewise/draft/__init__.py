"""Proposers: what drafts the tokens that a frame then verifies.

Holds: base the proposer interface; ngram, model SpecDec's drafters; decode LLM-42's fast path, by fast_passes
and quantized copies; skip/ SWIFT; auto/ the choice among them; cost_model measured costs and acceptance;
tuning every hand-set constant; tree draft trees, grown by tree_drafter from recycle, suffix_counts and
estimates; build makes the proposer that a configuration names.
State: each proposer owns what it knows of its sequences; the engine owns the proposer.
Imports: execute and the rooms below it; never verify or schedule.
"""

"""`skip`, SWIFT: the target model drafts for itself with some of its sublayers skipped.

Phase 1, context-based layer-set optimisation: optimiser, search, score_layer_set. Phase 2, confidence-aware
acceleration: pacing, confidence. Both use the costs in pricing and the set in active_set.
"""

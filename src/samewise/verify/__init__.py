"""Verification: runs frames over drafts, accepts or rejects them, and probes that frames keep their bits.

Holds: verifier runs frames; judge accepts or rejects; probe checks the frame property at start-up, with
    placement (its known text in frames), sampler_trial and culprit (names the operator that broke it);
    operators and frame_sizes find the sizes at which linears, norms and frames give the canonical bits.
State: the Verifier owns its host buffers and its captured graphs; everything else is stateless.
Imports: execute, model, kernels, contract, follow_up, user_cache, types, errors. Never draft or schedule.
"""

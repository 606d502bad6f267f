"""Execution: loads a model, runs passes of it, and samples from their logits.

Holds: load, choices and budget turn a configuration into a model on a device; runner runs frames and fast
    passes; staging and pack bring their inputs to the device, packed in C++ by native; compiler and passes
    compile layers; sampling, sampling_rows, logit_edits and filters choose tokens; numerics states the facts
    of device and libraries; process_state pins the switches of torch while an engine works, thread_pool the
    modes of torch's threads.
State: the Runner owns modules, KV tensors, staging buffers and graphs. Nothing else keeps state.
Imports: model, kv, kernels, config, follow_up, machine, user_cache, types, errors.
"""

"""The arithmetic whose bits are fixed per row, whatever else is in the batch.

Holds: attention (canonical paged attention: C++, torch, Triton); linear (products over packed weights);
    native (the C++ sources, their build, self-test and call structures); sampling (Triton passes over
    logits); cpu_sampling (what the sampler computes of rows of logits on a CPU: C++ or torch);
    noise (Gumbel noise as a function of seed, index, position and token id); graph (CUDA graph capture).
State: the process's one loaded C++ library, in `native.build`; nothing else.
Imports: errors, user_cache.
"""

"""Canonical paged attention: one interface, three implementations.

Holds: base (the interface), cpu and native (CPU), triton and its triton_… (CUDA), tiles and, in C++,
tiles.cpp with native_tiles (which rows share work).
State: none; KV tensors belong to kv.store.
Imports: kernels.native and the base modules.
"""

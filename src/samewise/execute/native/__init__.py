"""Packing in C++: the same staging buffers as `execute.pack` fills in Python, several times as fast.

Holds: pack.cpp, and packer, its ctypes side.
State: none but the loaded library; a Packer keeps the layout of staging buffers of one size.
Imports: kernels.attention (the work list), kernels.native.build (compiles the sources), kv.pages, errors.
"""

"""The C++ kernels: their sources, how they are built and loaded, and the structures they are called with.

Holds: attention.cpp, linear.cpp, grid.cpp (weights of few bits), layer.cpp, move.cpp, rotary.cpp and
    sampling.cpp; team.cpp (threads); the headers they share (lanes.h: vectors; panels.h: how weights of few
    bits stand in memory); selftest.cpp (digests of all of them for fixed inputs) and expected (those of every
    machine); build (compile, load, compare); calls (ctypes mirrors of calls.h).
State: the process's one loaded library, cached by build.
Imports: user_cache and errors.
"""

"""The C++ kernels: their sources, how they are built and loaded, and the structures they are called with.

Holds: attention.cpp, linear.cpp, layer.cpp; build (compile and load); calls (ctypes mirrors of calls.h).
State: the process's one loaded library, cached by build.
Imports: user_cache and errors.
"""

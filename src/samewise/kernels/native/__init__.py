"""The C++ kernels: their sources, how they are built and loaded, and the structures they are called with."""

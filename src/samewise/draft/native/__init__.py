"""The tree drafter in C++, and follow-ups: the same trees as `draft.tree_drafter`, thirty times as fast.

Holds: drafter.cpp, one translation unit with a header for each part, and drafter, its ctypes side.
State: each NativeDrafter owns one drafter in C++.
Imports: draft.tree_drafter and what it is made of; kernels.native.build, which compiles the source;
follow_up; errors.
"""

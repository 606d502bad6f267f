"""Compiler passes over a compiled layer's graph.

Holds: dedupe (equal products computed once), row_sums (sums of a row made order-free), cache_key.
State: none.
Imports: nothing of this package.
"""

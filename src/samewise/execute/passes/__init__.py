"""Compiler passes over a compiled layer's graph: equal products merged, sums of a row made order-free."""

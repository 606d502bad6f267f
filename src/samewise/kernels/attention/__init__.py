"""Canonical paged attention: `base` states the interface; `cpu`, `native` and `triton` implement it."""

"""Decides which sequences run, which rows a frame has, and makes verified tokens public. No tensors.

Holds: scheduler (queues, frames, commit); order (when a frame runs, which sequences go first);
owners (who stands back for whom); plan (a
sequence's next span); drafts (its draft and tokens); paging (its pages);
followed (what is known of the next frame before this one has landed);
limits (what may be spent); registry (what survives a failure); suspects (sequences of a failed step).
State: the Scheduler owns every Sequence and every page number.
Imports: kv (pages and the prefix index), counters, follow_up, types, errors.
"""

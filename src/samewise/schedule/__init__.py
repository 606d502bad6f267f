"""Decides which sequences run, which rows a frame has, and makes verified tokens public. No tensors.

Holds: scheduler (queues, frames, commit); registry (what survives a failure); plan (a sequence's next span);
drafts (a sequence's draft and tokens); paging (its pages); limits (what may be spent).
State: the Scheduler owns every Sequence and every page number.
Imports: kv (pages and the prefix index), counters, types, errors.
"""

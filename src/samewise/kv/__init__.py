"""The KV cache: page numbers, the prefix index over them, and the tensors behind them.

Holds: pages the free list and reference counts; prefix the index from token prefixes to pages; store the K
and V tensors of every layer.
State: PrefixIndex owns its PagePool and belongs to a scheduler; KVStore owns the tensors and belongs to a
runner.
Imports: kernels and the base modules; pages and prefix never import torch.
"""

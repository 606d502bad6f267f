"""Runs before any test module is imported."""

import os

import torch

# Where there is no CUDA device Triton kernels run in Triton's interpreter, which must be told before
# triton is first imported by anybody.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

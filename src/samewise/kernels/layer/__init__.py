"""What stands between a layer's products on CUDA: norms, rotary positions, storing K and V.

Holds: triton (launches), triton_kernels.
State: none.
Imports: the base modules.
"""

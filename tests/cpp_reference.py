"""The sums of the C++ kernels in the order their sources state, one float32 operation at a time, in torch.

A fused multiply-add is a product and a sum in float64, rounded once.
"""

import torch


def bits(x):
    """A tensor's bits as integers, so that NaN and the sign of zero count."""
    return x.contiguous().view(torch.int32 if x.element_size() == 4 else torch.int16)


def random_tensor(*size, seed=0, dtype=torch.float32):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def linear_reference(x, weight, bias=None):
    """x W' + b in the order of linear.cpp: 16 partial sums, added pairwise."""
    rows, inputs = x.shape
    padded = -(-inputs // 16) * 16
    wide_x, wide_w = torch.zeros(rows, padded), torch.zeros(weight.shape[0], padded)
    wide_x[:, :inputs], wide_w[:, :inputs] = x.float(), weight.float()
    lanes = torch.zeros(rows, weight.shape[0], 16)
    for k in range(0, padded, 16):
        product = wide_x[:, None, k : k + 16].double() * wide_w[None, :, k : k + 16].double()
        lanes = (product + lanes.double()).float()
    total = _sum_pairwise(lanes)[..., 0]
    return (total if bias is None else total + bias.float()).to(x.dtype)


def norm_reference(norm, x):
    """An RMS norm in the order of layer.cpp."""
    padded = torch.zeros(*x.shape[:-1], -(-x.shape[-1] // 16) * 16)
    padded[..., : x.shape[-1]] = x
    lanes = torch.zeros(*x.shape[:-1], 16)
    for k in range(0, padded.shape[-1], 16):
        part = padded[..., k : k + 16].double()
        lanes = (part * part + lanes.double()).float()
    mean = _sum_pairwise(lanes) / x.shape[-1] + torch.tensor(norm.variance_epsilon)
    root = mean.double().sqrt().float()  # torch's float32 sqrt is not always correctly rounded
    return norm.weight * (x * (1.0 / root))


def _sum_pairwise(lanes):
    for half in (8, 4, 2, 1):
        lanes = lanes[..., :half] + lanes[..., half : 2 * half]
    return lanes


def exp_reference(x):
    """`exp_below` of lanes.h, for x <= 0."""

    def fma(a, b, c):
        return (a.double() * torch.as_tensor(b).double() + torch.as_tensor(c).double()).float()

    f = torch.tensor
    clamped = x.clamp(min=-87.0)
    shift = f(float.fromhex("0x1.8p23"))
    shifted = fma(clamped, f(float.fromhex("0x1.715476p+0")), shift)
    n = shifted - shift
    r = fma(n, f(-float.fromhex("0x1.7f7d1cp-20")), fma(n, f(-float.fromhex("0x1.62e4p-1")), clamped))
    y = fma(f(1.9875691500e-4), r, f(1.3981999507e-3))
    for term in (8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = fma(y, r, f(term))
    y = fma(y, r * r, r) + 1.0
    power = ((n.int() + 127) << 23).view(torch.float32)
    return torch.where(x < -87.0, 0.0, y * power)

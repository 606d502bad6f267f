"""What the C++ kernels compute, in the order their sources state, one IEEE operation at a time.

Sums of float32 are in torch: a fused multiply-add is a product and a sum in float64, rounded once.
Functions in binary64 are in Python's floats: there it is a sum of fractions, rounded once.
"""

import math
import struct
from fractions import Fraction

import numpy as np
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
    mean = _sum_pairwise(lanes) / x.shape[-1] + torch.tensor(
        norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    )
    root = mean.double().sqrt().float()  # torch's float32 sqrt is not always correctly rounded
    weight = 1.0 + norm.weight if "Gemma" in type(norm).__name__ else norm.weight
    return weight * (x * (1.0 / root))


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


# -- functions.h, one number at a time, in Python's own floats -----------------------------------------


def fma64(a: float, b: float, c: float) -> float:
    """a * b + c, rounded once: Python's division of integers is correctly rounded."""
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    return float(exact) if exact else a * b + c


LN2_HIGH, LN2_LOW = float.fromhex("0x1.62e42feep-1"), float.fromhex("0x1.a39ef35793c76p-33")
ONE, ROOT_HALF = 0x3FF0000000000000, 0x3FE6A09E00000000


def log_reference(x: float) -> float:
    """`log_of`, for a positive, normal x."""
    b = _double_bits(x) + ONE - ROOT_HALF
    k = float((b >> 52) - 1023)
    f = _double_of((b & 0x000FFFFFFFFFFFFF) + ROOT_HALF) - 1.0
    s = f / (2.0 + f)
    z = s * s
    p = 1.0 / 23.0
    for odd in range(21, 1, -2):
        p = fma64(p, z, 1.0 / odd)
    twice = 2.0 * s
    low = fma64(twice * z, p, k * LN2_LOW)
    return k * LN2_HIGH + (twice + low)


HALF_PI, HALF_PI_LOW = float.fromhex("0x1.921fb54442d18p+0"), float.fromhex("0x1.1a62633145c07p-54")
TWO_BY_PI, SHIFT = float.fromhex("0x1.45f306dc9c883p-1"), float.fromhex("0x1.8p52")


def sine_cosine_reference(x: float) -> tuple[float, float]:
    """`sine_cosine`, for |x| < 2**31."""
    shifted = fma64(x, TWO_BY_PI, SHIFT)
    n = shifted - SHIFT
    r = fma64(-n, HALF_PI_LOW, fma64(-n, HALF_PI, x))
    z = r * r
    s = -1.0 / math.factorial(15)
    for term in range(13, 1, -2):
        s = fma64(s, z, (1.0 if term % 4 == 1 else -1.0) / math.factorial(term))
    s = fma64(s * z, r, r)
    c = 1.0 / math.factorial(16)
    for term in range(14, -1, -2):
        c = fma64(c, z, (1.0 if term % 4 == 0 else -1.0) / math.factorial(term))
    return ((s, c), (c, -s), (-s, -c), (-c, s))[_double_bits(shifted) & 3]


def _double_bits(x: float) -> int:
    return struct.unpack("<q", struct.pack("<d", x))[0]


def _double_of(b: int) -> float:
    return struct.unpack("<d", struct.pack("<q", b))[0]


# -- rotary.cpp and sampling.cpp -----------------------------------------------------------------------


def rotary_reference(positions, frequencies, scale=1.0):
    """Cosines and sines of R positions and D / 2 float32 frequencies: [R, D] each."""
    angles = np.array(positions, np.float32)[:, None] * np.array(frequencies, np.float32)
    turns = [[sine_cosine_reference(float(angle)) for angle in row] for row in angles]
    sines, cosines = (np.array(turns, np.float64)[..., i].astype(np.float32) for i in (0, 1))
    return tuple(np.concatenate([half * np.float32(scale)] * 2, -1) for half in (cosines, sines))


def row_stats_reference(row):
    """Token, largest logit and log of the sum of exponentials of one row of float32 logits."""
    top = np.float32(-np.inf)
    for x in row:  # NaN is larger than nothing
        top = max(top, x)
    token = int(np.argmax(row == top)) if (row == top).any() else 0
    with np.errstate(invalid="ignore"):
        below = exp_reference(torch.from_numpy(row - top)).numpy().astype(np.float64)
    total = 0.0
    for start in range(0, len(row), 4096):
        total = total + _sum_of_lanes(below[start : start + 4096])
    return token, top, np.float32(log_reference(total) if total > 0.0 else np.nan)


def _sum_of_lanes(values):
    """16 lane sums in binary64 in the order of ids, folded."""
    lanes = np.zeros(16)
    for start in range(0, len(values), 16):
        part = values[start : start + 16]
        lanes[: len(part)] = lanes[: len(part)] + part
    for half in (8, 4, 2, 1):
        lanes = lanes[:half] + lanes[half : 2 * half]
    return float(lanes[0])


def noise_reference(token, key):
    """Gumbel noise of a token id under a key of two 32-bit words."""

    def scramble(h):
        h ^= h >> 16
        h = h * 0x21F0AAAD & 0xFFFFFFFF
        h ^= h >> 15
        h = h * 0x735A2D97 & 0xFFFFFFFF
        return h ^ h >> 15

    h = scramble(scramble(token ^ key[0]) + key[1] & 0xFFFFFFFF)
    return np.float32(-log_reference(-log_reference(1.0 - (h + 0.5) * 2.0**-32)))


def scores_reference(row, temperature, key, limit):
    """Noise minus gap of one row of finite logits; -inf where the gap exceeds the limit."""
    gaps = (row.max() - row) / np.float32(temperature)
    noise = np.array([noise_reference(token, key) for token in range(len(row))], np.float32)
    return np.where(gaps > np.float32(limit), np.float32(-np.inf), noise - gaps)


def masses_reference(gaps, num_bits):
    """exp(-gap) in units of 2**-num_bits, rounded down."""
    exps = exp_reference(torch.from_numpy(-gaps)).numpy()
    return np.array([int(Fraction(float(x)) * 2**num_bits) for x in exps], np.int64)

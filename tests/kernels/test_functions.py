"""Logarithm, sine and cosine of functions.h: the bits of the stated order, near the true value."""

import ctypes
import math
import random
import subprocess
import sys
from decimal import Decimal, localcontext

import numpy as np
import pytest

from cpp_reference import fma64, log_reference, sine_cosine_reference
from native_variants import needs_compiler
from samewise.kernels.native import build as native_build

PROGRAM = """
#include "functions.h"
extern "C" void logs(const double* x, long n, double* y) {
    for (long i = 0; i < n; i++) y[i] = log_of(x[i]);
}
extern "C" void turns(const double* x, long n, double* y) {
    for (long i = 0; i < n; i++) {
        const Angle a = sine_cosine(x[i]);
        y[2 * i] = a.sine, y[2 * i + 1] = a.cosine;
    }
}
"""
PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534")
TINIEST, LARGEST = sys.float_info.min, sys.float_info.max


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The two functions over arrays, compiled with the options of the kernels."""
    if not native_build.compiler_available():
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("functions")
    (folder / "functions.cpp").write_text(PROGRAM)
    include = native_build.HEADERS[0].parent
    command = [*native_build.find_compiler(), *native_build.flags(), f"-I{include}"]
    command += [str(folder / "functions.cpp"), "-o", str(folder / "functions.so")]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(folder / "functions.so"))

    def call(name, xs, width):
        x, y = np.array(xs, np.float64), np.empty((len(xs), width))
        getattr(library, name)(
            ctypes.c_void_p(x.ctypes.data), ctypes.c_long(len(x)), ctypes.c_void_p(y.ctypes.data)
        )
        return y

    return {"log": lambda xs: call("logs", xs, 1)[:, 0], "turn": lambda xs: call("turns", xs, 2)}


def log_inputs(num=1500):
    rng = random.Random(1)
    xs = [1.0, 0.5, 2.0, TINIEST, LARGEST, math.e, 2.0**-33, 1 - 2.0**-33, 128_256.0]
    for sign in (-1, 1):  # near 1, and near the ends of the interval the mantissa is brought to
        xs += [
            centre + sign * 2.0**-e for centre in (1.0, math.sqrt(0.5), math.sqrt(2.0)) for e in range(1, 53)
        ]
    xs += [math.ldexp(rng.uniform(1, 2), rng.randrange(-1022, 1023)) for _ in range(num)]
    xs += [rng.uniform(0.5, 2) for _ in range(num)]
    return [x for x in xs if x >= TINIEST]


def angle_inputs(num=1500):
    rng = random.Random(2)
    xs = [0.0, -0.0, 1e-300, 2.0**-30, math.pi / 4, math.pi / 2, math.pi, 1e6, 2.0**31 - 1, -(2.0**31 - 1)]
    xs += [float(np.float32(k * math.pi / 4)) for k in range(-200, 200)]  # next to the ends of a quadrant
    xs += [rng.uniform(-10, 10) for _ in range(num)]
    xs += [float(np.float32(rng.uniform(0, 2 ** rng.randrange(1, 31)))) for _ in range(num)]
    return xs


def test_the_references_fused_multiply_add_rounds_once():
    a = 1.0 + 2.0**-27
    assert fma64(a, a, -1.0) == 2.0**-26 + 2.0**-54
    assert a * a - 1.0 != 2.0**-26 + 2.0**-54
    assert math.copysign(1.0, fma64(-0.0, 1.0, -0.0)) == -1.0


@needs_compiler
def test_logarithms_have_the_bits_of_the_stated_order(compiled):
    xs = log_inputs()
    expected = [log_reference(x) for x in xs]
    assert compiled["log"](xs).tobytes() == np.array(expected).tobytes()


@needs_compiler
def test_sines_and_cosines_have_the_bits_of_the_stated_order(compiled):
    xs = angle_inputs()
    expected = [sine_cosine_reference(x) for x in xs]
    assert compiled["turn"](xs).tobytes() == np.array(expected).tobytes()


def units_in_the_last_place(value: float, exact: Decimal) -> float:
    return abs(float((Decimal(value) - exact) / Decimal(math.ulp(float(exact)))))


def test_logarithms_are_right_to_a_few_units_in_the_last_place():
    with localcontext() as context:
        context.prec = 50
        errors = {
            x: units_in_the_last_place(log_reference(x), Decimal(x).ln()) for x in log_inputs(300) if x != 1
        }
    assert max(errors.values()) < 2.0, max(errors, key=errors.get)
    assert math.copysign(1.0, log_reference(1.0)) == 1.0
    assert log_reference(1.0) == 0.0


def exact_sine_cosine(x: float) -> tuple[Decimal, Decimal]:
    """By Taylor's series, after whole turns are taken off; for precision 90 and |x| < 2**31."""
    angle = Decimal(x) % (2 * PI)
    sine, cosine, term = Decimal(0), Decimal(0), Decimal(1)
    for k in range(1, 100):
        if k % 2:
            cosine += term if k % 4 == 1 else -term
        else:
            sine += term if k % 4 == 2 else -term
        term = term * angle / k
    return sine, cosine


def test_sines_and_cosines_are_right_far_beyond_a_float32():
    with localcontext() as context:
        context.prec = 90
        for x in angle_inputs(150):
            for value, exact in zip(sine_cosine_reference(x), exact_sine_cosine(x), strict=True):
                assert abs(Decimal(value) - exact) < Decimal(2) ** -51, x


def test_sines_and_cosines_near_a_multiple_of_a_quarter_turn_keep_their_digits():
    """A float32 angle this near the multiple of pi/2 loses no digit of its small sine or cosine."""
    with localcontext() as context:
        context.prec = 90
        for k in range(1, 200):
            x = float(np.float32(k * math.pi / 2))
            value, exact = min(
                zip(sine_cosine_reference(x), exact_sine_cosine(x), strict=True), key=lambda p: abs(p[0])
            )
            assert np.float32(value) == np.float32(float(exact))

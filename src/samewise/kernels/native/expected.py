"""The digests that `samewise_selftest` gives on every machine (selftest.cpp). Host only.

They change only with the kernels' arithmetic; then a fact of contracts changes, `ENGINE_VERSION` if no other.
"""

EXPECTED = {
    "linear float32": 0xB120F9DEA4ECFD05,
    "linear bfloat16": 0x1EBD6CABF7E16936,
    "linear float16": 0x22385B4CB84996BC,
    "linear int4": 0x43DF9B0CD815367B,
    "linear int8": 0xE7DE673139A13609,
    "attention float32": 0x451C1CE737CFB6BD,
    "attention bfloat16": 0x65656C5335350A10,
    "attention float16": 0x488AD4D72D48D770,
    "layer": 0x591D47D705F15BBB,
    "other layers": 0x3AF0120B3B418A00,
    "rotary": 0x05BBA6DDFE02F9A1,
    "sampling": 0x7F71008B17A1A69B,
    "ranks": 0xBEF22F5124CAC5E4,
    "long linears": 0x9290889739B8CEB6,
    "few rows": 0xCC1E2F24092895DC,
    "wide rows": 0x9250A501137E2614,
    "not finite": 0x7C30CB896B8F5EEA,
    "many rows": 0xD51E9597B8D5B524,
    "trees": 0x23F543BF6C0AD72F,
    "layer bfloat16": 0x9126C919CC128B78,
    "layer float16": 0x574E5F312933D53F,
    "move": 0xE48451AE2B2AE4DD,
}

__all__ = ["EXPECTED"]

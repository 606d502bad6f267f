"""The structures of calls.h, as ctypes, and the codes it gives to dtypes."""

from __future__ import annotations

import ctypes

import torch

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Activations of an MLP.
SILU = 0
GELU_TANH = 1
_ROW_TABLES = ("lengths", "slots", "page_start", "tail_start", "tail", "pages")


class AttentionCall(ctypes.Structure):
    """Mirrors ``Call`` in calls.h, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "k_pages", "v_pages", "out")),
        *((name, ctypes.c_void_p) for name in _ROW_TABLES),
        *((name, ctypes.c_int64) for name in ("rows", "listed_pages", "num_pages")),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "dim")),
        *((name, ctypes.c_int64) for name in ("q_row", "q_head", "k_row", "k_head", "v_row", "v_head")),
        *((name, ctypes.c_int64) for name in ("window", "dtype", "threads")),
        ("scale", ctypes.c_float),
    )


class Weights(ctypes.Structure):
    """Mirrors ``Weights`` in calls.h, field by field."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("outputs", "inputs", "form", "scale_bytes")),
    )


class Product(ctypes.Structure):
    """Mirrors ``Product`` in calls.h, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("w", "x", "bias", "y")),
        *((name, ctypes.c_int64) for name in ("rows", "y_row", "dtype", "threads")),
    )


class Norm(ctypes.Structure):
    """Mirrors ``Norm`` in calls.h, field by field."""

    _fields_ = (("weight", ctypes.c_void_p), ("eps", ctypes.c_float), ("plus_one", ctypes.c_int32))


class Side(ctypes.Structure):
    """Mirrors ``Side`` in calls.h."""

    _fields_ = (("weights", ctypes.c_void_p * 3), ("bias", ctypes.c_void_p * 3), ("count", ctypes.c_int64))


class Layer(ctypes.Structure):
    """Mirrors ``Layer`` in calls.h."""

    _fields_ = (
        *((name, Norm) for name in ("first", "second", "q_norm", "k_norm", "after_attention", "after_mlp")),
        *((name, Side) for name in ("qkv", "o", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("k_pages", "v_pages")),
        *((name, ctypes.c_int64) for name in ("num_pages", "heads", "kv_heads", "dim", "window")),
        *((name, ctypes.c_int64) for name in ("width", "inner", "rotary", "over_heads", "activation")),
        ("dtype", ctypes.c_int64),
        *((name, ctypes.c_float) for name in ("scale", "share")),
    )


class Visit(ctypes.Structure):
    """Mirrors ``Visit`` in calls.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "cos", "sin", "y")),
        *((name, ctypes.c_void_p) for name in _ROW_TABLES),
        *((name, ctypes.c_int64) for name in ("rows", "listed_pages", "threads")),
    )


class LayerPages(ctypes.Structure):
    """Mirrors ``LayerPages`` in calls.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("k_pages", "v_pages")),
        *((name, ctypes.c_int64) for name in ("kv_heads", "dim")),
    )


class Move(ctypes.Structure):
    """Mirrors ``Move`` in calls.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layers", "sources", "targets")),
        *((name, ctypes.c_int64) for name in ("num_layers", "count", "num_pages", "item")),
    )


__all__ = [
    "DTYPE_CODES",
    "GELU_TANH",
    "SILU",
    "AttentionCall",
    "Layer",
    "LayerPages",
    "Move",
    "Norm",
    "Product",
    "Side",
    "Visit",
    "Weights",
]

"""Linears whose bits do not depend on the number of rows.

Holds: packed (weights in their smallest exact form, and the product with them).
State: none.
Imports: kernels.native and the base modules.
"""

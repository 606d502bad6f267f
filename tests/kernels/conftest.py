"""A compile cache per instruction set."""

import os
import tempfile
from pathlib import Path

# Inductor's cache key does not name the instruction set that ATEN_CPU_CAPABILITY selects: a cached graph of
# another one fails to compile, or gives wrong results.
if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
    cache = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}_{capability}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))

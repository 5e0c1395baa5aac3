from __future__ import annotations

import os

# cuBLAS needs this before its first call for deterministic results.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

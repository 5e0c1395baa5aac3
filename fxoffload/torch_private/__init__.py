"""Private APIs of torch and transformers: fxoffload uses such names only here (tests/test_private_names.py).

Supported: torch 2.11 and newer. One file a concern. Each function says which names it stands for and which torch
versions have them, so that a new release is checked by reading these files.

The import refuses a torch that is too old, and imports no torch itself.
"""

from __future__ import annotations

from fxoffload.torch_private import check_version as check_version

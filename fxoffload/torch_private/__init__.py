"""Private APIs of torch and transformers: fxoffload uses such names only here (tests/test_private_names.py).

Supported: torch 2.11 and newer. One file a concern. Each function's docstring names the torch versions that need it and
the private names that it stands for, so that a new release is checked by reading these files. They were read against
torch 2.11.0, 2.13.0 and 2.14.1.

The import refuses a torch that is too old, and imports no torch itself.
"""

from __future__ import annotations

from fxoffload.torch_private import check_version as check_version

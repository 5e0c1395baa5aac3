"""Private torch APIs of Dynamo: the base of errors that pass it with their own type, and whether it shows all frames,
needed by torch 2.11 to 2.14."""

from __future__ import annotations

from torch._dynamo import config
from torch._dynamo.exc import ShortenTraceback as ShortenTraceback


def is_verbose() -> bool:
    """Whether the user asked for Dynamo's own frames in tracebacks (``TORCHDYNAMO_VERBOSE=1``).

    Needed by torch 2.11 to 2.14: ``torch._dynamo.config``.
    """
    return bool(config.verbose)

"""Opens a folder: its files agree, its experts are known and complete."""

from __future__ import annotations

import os

from fxoffload.checkpoints.check_experts import check_experts
from fxoffload.checkpoints.folder_name import about
from fxoffload.checkpoints.index import open_checkpoint
from fxoffload.checkpoints.layouts import Experts, detect


def open_experts(folder: str | os.PathLike[str], pattern: str | None) -> Experts:
    """The checkpoint in ``folder``, read from headers and JSON. Raises CheckpointError, which names the folder."""
    with about(folder):
        experts = detect(open_checkpoint(folder), pattern)
        check_experts(experts)
        return experts

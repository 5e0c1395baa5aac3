"""A check for objects that a forked child inherits: its error names the fork.

[Note: Phases and fork]
Locks are free in a child (``fxoffload.runtime.fork_safe_lock``). The threads that move bytes do not run in it, and the
host image is not its own. A tensor that was away at the fork stays away, and says so when it is touched.
"""

from __future__ import annotations

import os


class Birthplace:
    """The process in which an object was made."""

    def __init__(self) -> None:
        self._process = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is that process."""
        return os.getpid() == self._process

    def require(self, what: str) -> None:
        """Refuses to go on in a forked child.

        Raises:
            RuntimeError: this is another process.
        """
        if not self.is_here:
            raise RuntimeError(
                f"expected {what} in the process that made the PhaseManager ({self._process}), found process "
                f"{os.getpid()}: this process was forked, and has neither the threads that move memory nor the host "
                "image. Call it in the parent, or make the child with the spawn or forkserver method"
            )

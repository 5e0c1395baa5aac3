"""The state that ``torch.compiler.reset()`` and ``torch._dynamo.reset()`` make fxoffload forget.

[Note: Reset] torch calls the backend's ``reset`` while it walks through all backends. An import there may compile
something (flex attention does) and so change the list that torch walks through. So a module with state of compiled
graphs registers here, at its import, how to forget it. torch also holds its compile lock, so nothing registered here
may wait for a thread that compiles or plans.
"""

from __future__ import annotations

from collections.abc import Callable

_FORGET: list[Callable[[], object]] = []


def on_reset(forget: Callable[[], object]) -> None:
    """Call ``forget`` at each reset; see [Note: Reset]."""
    _FORGET.append(forget)


def reset() -> None:
    """Forget compiled graphs. Steps under way end as they began: autograd holds what their backwards need."""
    for forget in _FORGET:
        forget()

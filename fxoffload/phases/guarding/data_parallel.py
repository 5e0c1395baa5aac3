"""Forwards of ``DistributedDataParallel``, seen from the modules that it is around.

[Note: DDP]
Before its module's forward DDP broadcasts the buffers under it, in C++, which asks no tensor. Managers are often given
the module without the wrapper (callbacks of transformers are), or before there is one, and a module does not know its
wrapper. Rejected: a search for it. That takes a pass over all Python objects at each offload, and finds nothing that
``gc.freeze()`` froze. So while there are watchers, the class has another forward, which asks all of them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from fxoffload.phases.guarding.overrides import leads_to
from fxoffload.runtime.fork_safe_lock import ForkSafeRLock, locked

Watcher = Callable[[DistributedDataParallel], object]


class _Forwards:
    """The class's own forward, and the one in its place while there are watchers."""

    def __init__(self) -> None:
        self._lock = ForkSafeRLock()
        self._watchers: tuple[weakref.WeakMethod[Watcher], ...] = ()  # one that was dropped watches no longer
        self._original: Callable[..., Any] = DistributedDataParallel.forward
        self._examined: tuple[Any, bool] = (None, False)  # the forward in place, and whether it calls ours

        ask: Any = torch.compiler.disable(self._ask)

        @functools.wraps(self._original)
        def forward(ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
            ask(ddp)
            return self._original(ddp, *args, **kwargs)

        # The same one each time, called and not traced: see [Note: Overrides]. Its callees are compiled as ever.
        self._ours: Any = torch.compiler.disable(forward, recursive=False)

    @locked(lambda self, watcher: self._lock)
    def watch(self, watcher: Watcher) -> None:
        """Lets a bound method be called with each ``DistributedDataParallel`` whose forward begins, until ``ignore`` or
        the end of the object that the method is bound to."""
        self._keep((*self._watchers, weakref.WeakMethod(watcher)))
        now = DistributedDataParallel.forward
        if self._examined[0] is not now:
            self._examined = now, leads_to(now, self._ours)
        if not self._examined[1]:
            self._original = now
            DistributedDataParallel.forward = self._ours

    @locked(lambda self, watcher: self._lock)
    def ignore(self, watcher: Watcher) -> None:
        """Ends that. May be called twice, and before ``watch``."""
        self._keep(one for one in self._watchers if one() != watcher)
        if not self._watchers and DistributedDataParallel.forward is self._ours:
            DistributedDataParallel.forward = self._original

    def _ask(self, ddp: DistributedDataParallel) -> None:
        for reference in self._watchers:
            watcher = reference()
            if watcher is not None:
                watcher(ddp)

    def _keep(self, watchers: Iterable[weakref.WeakMethod[Watcher]]) -> None:
        self._watchers = tuple(one for one in watchers if one() is not None)


forwards = _Forwards()

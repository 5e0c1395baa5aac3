"""Private torch APIs of what Dynamo keeps: compiled forms, learnt sizes, backends."""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from torch._dynamo import convert_frame, eval_frame
from torch._dynamo.backends import registry


@contextlib.contextmanager
def without_learnt_sizes() -> Iterator[None]:
    """Compile as if Dynamo had compiled nothing before, and as if nothing had been compiled afterwards.

    Stands for ``torch._dynamo.pgo._CODE_STATE``: for the whole process, the sizes that each piece of code was compiled
    with. A second size makes the next compilation one for dynamic sizes.

    Needed by torch 2.11 to 2.14.
    """
    from torch._dynamo import pgo

    learnt, pgo._CODE_STATE = pgo._CODE_STATE, defaultdict(pgo.CodeState)
    try:
        yield
    finally:
        pgo._CODE_STATE = learnt


class _Never:
    """Stands for an object that no frame has: an entry that names it does not count for ``config.recompile_limit``."""

    def __call__(self) -> object:
        return self


@contextlib.contextmanager
def forgotten(backend: Callable[..., Any]) -> Iterator[None]:
    """At the end, Dynamo forgets the code that it compiled with ``backend`` meanwhile.

    It also forgets its decisions about code that it had not seen before. Code compiled with other backends stays.

    Stands for Dynamo's lists of compiled forms: code that has none but these is reset, and was never seen. Where others
    are there too, Dynamo can only mark a form as invalid.

    Needed by torch 2.11 to 2.14: ``_debug_get_cache_entry_list``, ``reset_code``, ``input_codes``.
    """
    before = {id(code) for code in _codes()}
    try:
        yield
    finally:
        for code in _codes():
            entries = eval_frame._debug_get_cache_entry_list(code)
            mine = [e for e in entries if innermost(e.backend) is backend]
            if len(mine) == len(entries) and (mine or id(code) not in before):
                eval_frame.reset_code(code)  # pyright: ignore[reportPrivateImportUsage]
                _forget(code)
            else:
                for entry in mine:
                    _invalidate(entry)


def _codes() -> list[Any]:
    """The code that Dynamo has looked at."""
    return [code for ref in convert_frame.input_codes.seen if (code := ref()) is not None]


def _forget(code: Any) -> None:
    """Or the next plan would take a decision that Dynamo makes about it (to skip it, for a graph break in a loop) for
    the process' own, and leave it."""
    codes = convert_frame.input_codes
    codes.seen[:] = [ref for ref in codes.seen if ref() is not code]
    codes.seen_ids.discard(id(code))


def _invalidate(entry: Any) -> None:
    from torch._dynamo.guards import DeletedGuardManagerWrapper

    guards = entry.guard_manager
    if getattr(guards, "cache_entry", None) is None:
        return
    deleted = DeletedGuardManagerWrapper("it was compiled for a plan ahead")
    deleted.id_matched_objs = {"": _Never()}  # type: ignore[dict-item]
    guards.extra_state.invalidate(guards.cache_entry, deleted)


def innermost(callback: Any) -> Any:
    """The function that the user's ``backend=`` stands for.

    Needed by torch 2.11 to 2.14: ``_torchdynamo_orig_backend``.
    """
    while (inner := getattr(callback, "_torchdynamo_orig_backend", None)) is not None:
        callback = inner
    callback = getattr(callback, "compiler_fn", callback)  # torch.compile's wrapper, which adds mode and options
    while isinstance(callback, functools.partial):
        callback = callback.func
    return callback


def add_backend(name: str, backend: Callable[..., Any]) -> None:
    """Let ``torch.compile`` know a backend by its name, if it knows none of that name.

    Needed by torch 2.11 to 2.14: ``registry._COMPILER_FNS``; ``list_backends`` imports all backends.
    """
    if name not in registry._COMPILER_FNS:
        registry.register_backend(backend, name=name)


def keep_reset(backend: Callable[..., Any]) -> None:
    """Have the next reset call ``backend.reset``. Each reset forgets whom it called, and only ``torch.compile`` tells
    it anew: not a function that was compiled before, and is compiled again at its next call.

    Needed by torch 2.11 to 2.14: ``eval_frame.cached_backends``.
    """
    eval_frame.cached_backends.setdefault(id(backend), backend)

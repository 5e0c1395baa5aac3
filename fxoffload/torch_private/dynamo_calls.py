"""Private torch APIs of Dynamo: which calls it runs compiled, and where it stops compiling.

Dynamo keeps all compiled forms of a code object in one list. ``config.recompile_limit`` bounds how many of them fit the
same modules, and ``config.accumulated_recompile_limit`` how many there are. When a limit is used up, nothing of that
code object is compiled any more. One model that generates, computes log-probs and trains has one code object for all
three, so that generation uses up a limit before training begins.

``watch_calls`` replaces two functions of Dynamo, for frames of one backend only:

- Both limits are counted apart for calls with and for calls without gradients.
- Decisions of Dynamo about a frame that it does not compile (run it uncompiled, look at its callees or not) hold for
  calls of the same of these two kinds. Decisions that Dynamo takes before it tries to compile stay as they are. Under
  ``config.disable`` and ``TorchDispatchMode`` s they hold for that call alone.

It also adds a hook to each function that is compiled with that backend, which is called around each of its calls.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any, Protocol

import torch
from torch._dynamo import config, convert_frame, eval_frame

from fxoffload.torch_private.dynamo_cache import innermost
from fxoffload.torch_private.dynamo_state import why_off

_KEY = "fxoffload"  # in Dynamo's dict of a code object, which lives as long as its compiled forms


class CallWatch(Protocol):
    """What ``watch_calls`` tells. ``has_grad``: whether gradients were enabled when the frame began."""

    def call_begins(self) -> Callable[[], None]:
        """A call of a compiled function begins. Returns a function that is called when it ends."""
        ...

    def ran_uncompiled(self, code: CodeType, limit: str, most: int, *, has_grad: bool) -> None:
        """A frame runs uncompiled because ``config.<limit>``, which was ``most``, is used up."""
        ...


@dataclass
class _Decision:
    """Dynamo's decision about frames of one code object that it did not compile. ``limit``: that was used up, and
    ``most``: of how many."""

    result: Any
    limit: str
    most: int


@dataclass
class _Kind:
    """Dynamo's compiled forms of one code object for calls with gradients, or for those without."""

    forms: set[Any] = field(default_factory=set)  # compile ids
    num_attempts: int = 0  # to compile one


@dataclass
class _Compiled:
    """One code object. The keys say whether gradients are enabled, and in which region (``_region``)."""

    kinds: dict[bool, _Kind] = field(default_factory=lambda: {True: _Kind(), False: _Kind()})
    decided: dict[tuple[bool, int], _Decision] = field(default_factory=dict)


@dataclass
class _Attempt:
    """Dynamo looks at one frame, of a call of this ``kind``. ``began``: it tries to compile it.

    Three numbers don't count for the limits, because they are of the other kind: ``num_forms`` that fit the frame,
    ``num_forms_of_code`` and ``num_attempts``.
    """

    kind: _Kind
    num_forms: int
    num_forms_of_code: int
    num_attempts: int
    began: bool = False
    limit: str = ""
    most: int = 0


class _Attempts(threading.local):
    now: _Attempt | None = None


_attempts = _Attempts()


def watch_calls(backend: Callable[..., Any], watch: CallWatch) -> None:
    """See the module docstring. For good: called once, when ``backend`` is defined.

    Needed by torch 2.11 to 2.14; from torch 2.13 on, regions (``isolate_recompiles``) have limits of their own.
    """
    look_at_frame = convert_frame.CatchErrorsWrapper.__call__
    exceeds_limit = convert_frame.exceeds_recompile_limit  # pyright: ignore[reportPrivateImportUsage]
    make_context = eval_frame.OptimizeContext.__init__

    @functools.wraps(look_at_frame)
    def look(self: Any, frame: Any, cache_entry: Any, frame_state: dict[str, Any]) -> Any:
        if innermost(self) is not backend:
            with _attempt(None):
                return look_at_frame(self, frame, cache_entry, frame_state)
        has_grad = torch.is_grad_enabled()
        compiled = frame_state.setdefault(_KEY, _Compiled())
        key = has_grad, _region()
        decision = compiled.decided.get(key)
        if decision is None:
            kind, other = compiled.kinds[has_grad], compiled.kinds[not has_grad]
            attempt = _Attempt(kind, *_num_forms(frame, other.forms), other.num_attempts)
            with _attempt(attempt):
                result = look_at_frame(self, frame, cache_entry, frame_state)
            if result.guarded_code is not None:
                kind.forms.add(result.guarded_code.compile_id)
                return result
            if not attempt.began and not why_off():
                return result
            result.apply_to_code = False
            decision = _Decision(result, attempt.limit, attempt.most)
            if attempt.began:
                compiled.decided[key] = decision
        if decision.limit:
            watch.ran_uncompiled(frame.f_code, decision.limit, decision.most, has_grad=has_grad)
        return decision.result

    @functools.wraps(exceeds_limit)
    def exceeds(cache_size: Any, compile_id: Any) -> tuple[bool, str]:
        attempt = _attempts.now
        if attempt is None:
            return exceeds_limit(cache_size, compile_id)
        attempt.began = True
        attempt.kind.num_attempts += 1
        exceeded, limit = exceeds_limit(*_of_kind(attempt, cache_size, compile_id))
        if exceeded:
            attempt.limit, attempt.most = limit, getattr(config, limit)
        return exceeded, limit

    @functools.wraps(make_context)
    def make(self: Any, callback: Any, *args: Any, **kwargs: Any) -> None:
        make_context(self, callback, *args, **kwargs)
        if innermost(callback) is backend:
            self.enter_exit_hooks.append(watch.call_begins)

    convert_frame.CatchErrorsWrapper.__call__ = look
    convert_frame.exceeds_recompile_limit = exceeds  # pyright: ignore[reportPrivateImportUsage]
    eval_frame.OptimizeContext.__init__ = make


@contextlib.contextmanager
def _attempt(attempt: _Attempt | None) -> Iterator[None]:
    before, _attempts.now = _attempts.now, attempt
    try:
        yield
    finally:
        _attempts.now = before


def _region() -> int:
    """Functions compiled with ``isolate_recompiles`` have forms, and a limit, of their own. -1: of all others, and up
    to torch 2.12."""
    current: Any = torch._C
    region = getattr(current._dynamo.eval_frame, "get_eval_frame_isolate_recompiles_id", None)
    return -1 if region is None else region()


def _num_forms(frame: Any, compile_ids: set[Any]) -> tuple[int, int]:
    """How many of these compiled forms Dynamo counts where it looks at ``frame``: for ``config.recompile_limit``, and
    for ``config.accumulated_recompile_limit``, which is one for all regions."""
    from torch._dynamo.cache_size import _has_same_id_matched_objs

    if not compile_ids:
        return 0, 0
    of_region = getattr(eval_frame, "_get_cache_entries_for_region", None)
    code = frame.f_code
    of_code = [e for e in eval_frame._debug_get_cache_entry_list(code) if e.compile_id in compile_ids]
    entries = of_code if of_region is None else [e for e in of_region(code, _region()) if e.compile_id in compile_ids]
    return sum(_has_same_id_matched_objs(frame, e) for e in entries), len(of_code)


def _of_kind(attempt: _Attempt, cache_size: Any, compile_id: Any) -> tuple[Any, Any]:
    """The numbers that Dynamo compares with the limits, without those of the other kind.

    It compares the number of this attempt too: an attempt that fails leaves no form.
    """
    of_code = "total_cache_entries_all_regions"
    if not hasattr(cache_size, of_code):  # up to torch 2.12
        of_code = "num_cache_entries"
    same = "num_cache_entries_with_same_id_matched_objs"
    others = {same: attempt.num_forms, of_code: attempt.num_forms_of_code}
    cache_size = replace(cache_size, **{name: getattr(cache_size, name) - num for name, num in others.items()})
    return cache_size, replace(compile_id, frame_compile_id=compile_id.frame_compile_id - attempt.num_attempts)

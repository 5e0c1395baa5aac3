"""Private torch APIs of autograd: the running backward, hooks on saved tensors, nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import _autograd  # type: ignore[attr-defined]
from torch.autograd.function import BackwardCFunction

from fxoffload.torch_private.tensor_subclasses import is_traceable_wrapper_subclass


def saved_tensor_hooks_active() -> bool:
    """Whether saved-tensor hooks (user's, non-reentrant checkpoint's, ``save_on_cpu``) would see what we save now.

    Needed by torch 2.11 to 2.14: ``torch._C._autograd._top_saved_tensors_default_hooks``.
    """
    return _autograd._top_saved_tensors_default_hooks(True) is not None


def saved_tensor_hooks_module() -> str:
    """The module that defines the saved-tensor hooks which would see what we save now; "" where that is unknown.

    Needed by torch 2.11 to 2.14: ``torch._C._autograd._top_saved_tensors_default_hooks``.
    """
    hooks = _autograd._top_saved_tensors_default_hooks(True)
    return "" if hooks is None else str(getattr(hooks[0], "__module__", None) or "")


def compiled_autograd_active() -> bool:
    """Whether compiled autograd is on: it reads saved tensors itself, so none of them may be a token.

    Needed by torch 2.11 to 2.14: switches in ``torch._dynamo.compiled_autograd`` and ``torch._dynamo.config``.
    """
    from torch._dynamo import compiled_autograd, config

    return bool(
        compiled_autograd.compiled_autograd_enabled
        or compiled_autograd.in_compiled_autograd_region
        or config.compiled_autograd
    )


def backward_keeps_graph() -> bool:
    """Whether the running backward was called with ``retain_graph=True`` or ``create_graph=True``.

    Needed by torch 2.11 to 2.14: ``torch._C._autograd._get_current_graph_task_keep_graph``.
    """
    return bool(_autograd._get_current_graph_task_keep_graph())


def in_backward() -> bool:
    """Whether this thread is running a node of an autograd backward (reentrant checkpoint's second forward).

    Needed by torch 2.11 to 2.14: ``torch._C._current_graph_task_id``.
    """
    return torch._C._current_graph_task_id() != -1


def after_backward(work: Callable[[], None]) -> None:
    """Call ``work`` when autograd has ended the backward in which this is called, after earlier requests of this kind.

    Outside of a backward it is called at once. It is not called where the backward raises.

    Needed by torch 2.11 to 2.14: ``Variable._execution_engine.queue_callback``.
    """
    if in_backward():
        torch.autograd.Variable._execution_engine.queue_callback(work)
    else:
        work()


def num_autograd_nodes() -> int:
    """How many nodes of autograd's graph this thread has made. Those of parameters are not counted.

    Needed by torch 2.11 to 2.14: ``torch.autograd._get_sequence_nr``.
    """
    return torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]


def leave_gradients_undefined(outputs: Sequence[Any], num_nodes: int) -> None:
    """The node of a call of AOTAutograd that returned ``outputs`` passes None, not zeros, for those that no gradient
    comes to. Not where some are of subclasses: AOTAutograd takes the gradients of these apart.

    Needed by torch 2.11 to 2.14: ``Node._sequence_nr``; only ``forward`` may call ``set_materialize_grads``.

    Args:
        num_nodes: ``num_autograd_nodes()`` before the call. Outputs may be those of older nodes, whoever made them.
    """
    if any(is_traceable_wrapper_subclass(o) for o in outputs):
        return
    for output in outputs:
        node = output.grad_fn if isinstance(output, torch.Tensor) else None
        if isinstance(node, BackwardCFunction) and node._sequence_nr() >= num_nodes:
            node.set_materialize_grads(False)
            return

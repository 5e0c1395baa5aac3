"""Private torch APIs of AOTAutograd: its configuration, and how it describes a graph's inputs."""

from __future__ import annotations

import contextlib
import enum
import re
from typing import Any

import torch.fx as fx
from torch._guards import TracingContext

# The steps of a source: "kwargs" and "input_ids" of ``L['kwargs']['input_ids']``, "x" of ``L['self'].x``.
_STEPS = re.compile(r"\['([^']+)'\]|\.([A-Za-z_]\w*)|\[(\d+)\]")

# functorch.config switches that hold while one of our graphs is compiled:
#  - Plain callables cannot go into AOTAutograd's cache. (Inductor's own cache still works per segment.)
#  - The backward is compiled together with the forward. So a failing pass raises at compile time, and the host arena is
#    pinned while the rest compiles, not inside the first step.
AOT_CONFIG: dict[str, Any] = {"enable_autograd_cache": False, "force_non_lazy_backward_lowering": True}


def aot_config_patch() -> contextlib.AbstractContextManager[Any]:
    """Patch ``torch._functorch.config`` for the duration of one compilation.

    Needed by torch 2.11 to 2.14: ``torch._functorch.config``.
    """
    import torch._functorch.config as functorch_config

    return functorch_config.patch(AOT_CONFIG)


def take_donated_placeholders() -> set[int]:
    """AOTAutograd's list of backward inputs that may be reused in place, emptied for AOTAutograd itself.

    The list object is shared by all metadata of the graph; emptied, AOTAutograd no longer refuses ``retain_graph=True``
    and Inductor no longer applies whole-graph indices to a segment. Donation is then decided per segment by us.

    Needed by torch 2.11 to 2.14: ``ViewAndMutationMeta.bw_donated_idxs``.
    """
    context = TracingContext.try_get()
    idxs = getattr(context.fw_metadata, "bw_donated_idxs", None) if context and context.fw_metadata else None
    if not idxs:
        return set()
    taken = set(idxs)
    idxs.clear()
    return taken


class InputOrigin(enum.Enum):
    """The kind of a joint graph's input, where it is no input of the graph that was compiled."""

    UNKNOWN = "unknown"
    PARAMETER = "a parameter or a buffer"
    OTHER = "other"


def origin_of(node: fx.Node) -> InputOrigin | int:
    """Which input of the graph that was compiled a joint graph's input is, or is a part of.

    Stands for ``node.meta["desc"]``: AOTAutograd's descriptors (``torch._functorch._aot_autograd.descriptors``).

    Needed by torch 2.11 to 2.14: the descriptors and ``node.meta["desc"]``.
    """
    from torch._functorch._aot_autograd import descriptors

    found = node.meta.get("desc")
    while not isinstance(found, descriptors.PlainAOTInput):
        if isinstance(found, (descriptors.ParamAOTInput, descriptors.BufferAOTInput)):
            return InputOrigin.PARAMETER
        if isinstance(found, descriptors.SubclassGetAttrAOTInput):
            found = found.base
        elif isinstance(found, (descriptors.ViewBaseAOTInput, descriptors.SyntheticBaseAOTInput)):
            found = found.base_of
        else:
            return InputOrigin.UNKNOWN if found is None else InputOrigin.OTHER
    return found.idx


def is_static_placeholder(node: fx.Node) -> bool:
    """Whether an input of a graph from Dynamo is a parameter or a buffer, or was found where FSDP1 keeps a module's.

    Stands for ``tensor_dict["_dynamo_static_input_type"]`` and ``_dynamo_source`` of the graph's placeholders.

    Needed by torch 2.11 to 2.14.
    """
    if (node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type"):
        return True
    source = getattr(node, "_dynamo_source", None)
    return source is not None and source.guard_source.is_fsdp_module()


def name_of_input(node: fx.Node) -> str:
    """What the user calls an input of a graph from Dynamo: "input_ids" of ``L['kwargs']['input_ids']``; "" where that
    is not known.

    Needed by torch 2.11 to 2.14: ``node.meta["grapharg"]`` and its source.
    """
    source = getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", "")
    steps = _STEPS.findall(str(name() if callable(name) else name))
    places = ""
    for key, attribute, place in reversed(steps):
        if not place:
            found = key or attribute
            return "" if found.startswith("___") else f"{found}{places}"  # Dynamo's own
        places = f"[{place}]{places}"
    return ""

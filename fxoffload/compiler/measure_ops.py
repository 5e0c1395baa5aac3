"""Times the heavy operators of a joint graph on the device, at their real shapes, strides and dtypes.

Heavy operators are those that are kernels of their own: matrix products, attention with its mask, grouped products,
convolutions, sorts, custom operators. What Inductor fuses (scatters and reductions among it) has another kernel there
than the operator has alone; its time comes with its segment's (``measure_segments``).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch.fx as fx

from fxoffload.analysis.estimate_costs import Rates, estimate_segment
from fxoffload.analysis.hidden_memory import hidden_bytes
from fxoffload.analysis.op_costs import call_of, distinct_bytes, kwargs_of, node_kind, op_name
from fxoffload.analysis.op_key import op_key
from fxoffload.compiler.made_up import MadeUp, NotMadeUpError, why_not
from fxoffload.compiler.measuring import FOR_SEGMENTS_S, NO_ROOM, NO_TIME, Allowance, note_estimated, reason_of
from fxoffload.counters import counters
from fxoffload.machine.devices import Identity
from fxoffload.machine.meters import Meter, Work
from fxoffload.machine.op_times import OpTimes, Outcomes, times_of

log = logging.getLogger(__name__)

_HEAVY = ("matmul", "attention", "convolution", "opaque")
# Calls of one operator, warm-up included.
_CALLS = 10
# Room for workspaces that are not known, as a factor.
_MARGIN = 1.25


def measure_ops(joint: fx.GraphModule, identity: Identity, rates: Rates, meter: Meter, allowance: Allowance) -> OpTimes:
    """Times of the heavy operators of ``joint``: kept ones, else measured now. Those that were not are counted.

    Args:
        joint: is left as it is.
        identity: of the device, under which times are kept.
        rates: what takes longest by these is measured first.
    """
    nodes, reasons = _heavy(joint, rates, meter.least_ms)
    for reason in reasons:
        note_estimated("operators", reason)

    def measure(missing: list[str]) -> Outcomes:
        reserved_s = min(FOR_SEGMENTS_S, allowance.left_s / 2)
        if reason := meter.why_not() or (allowance.left_s - reserved_s <= meter.warm_up_s and NO_TIME):
            return dict.fromkeys(missing, reason)
        found: dict[str, float | str] = {}
        with allowance.spending(), meter.undisturbed():
            for key in missing:
                node, estimated_ms = nodes[key]
                found[key] = _measure(node, estimated_ms, meter, allowance, reserved_s)
        _say(found, {k: nodes[k] for k in missing})
        return found

    found = times_of(identity, nodes, measure)
    for reason, count in found.reasons.items():
        note_estimated("operators", reason, count)
    return found


def _heavy(joint: fx.GraphModule, rates: Rates, least_ms: float) -> tuple[dict[str, tuple[fx.Node, float]], list[str]]:
    """Key -> operator and its estimate, the longest first; and why others cannot run, one for each."""
    found: dict[str, tuple[fx.Node, float]] = {}
    reasons: dict[str, str] = {}
    for node in joint.graph.nodes:
        if node.op != "call_function" or node_kind(node) not in _HEAVY:
            continue
        key = op_key(node)
        reason = why_not([node]) or ("its arguments are no plain values" if key is None else "")
        if key is None or reason:
            reasons[key or op_name(call_of(node)[0])] = reason
        elif key not in found and (ms := estimate_segment([node], rates)) >= least_ms:
            found[key] = node, ms
    longest = sorted(found.items(), key=lambda item: -item[1][1])
    return dict(longest), list(reasons.values())


def _measure(node: fx.Node, estimated_ms: float, meter: Meter, allowance: Allowance, reserved_s: float) -> float | str:
    if _CALLS * estimated_ms / 1e3 > allowance.left_s - reserved_s:
        return NO_TIME
    try:
        inputs = _inputs_of(node)
        made = MadeUp(inputs, [node], meter.device)
        needed = made.nbytes + (distinct_bytes(node) or 0) + hidden_bytes(node)
        if _MARGIN * needed > meter.room_bytes():
            return NO_ROOM
        work = _work(node, dict(zip(inputs, made.make(), strict=True)))
        with allowance.aside():  # libraries choose a kernel, as in the first step
            meter.once_ms(work)
        ms = meter.ms(work)
    except NotMadeUpError as error:
        return str(error)
    except Exception as error:
        return reason_of(error)
    counters.add("num_ops_measured")
    return ms


def _inputs_of(node: fx.Node) -> list[fx.Node]:
    found: dict[fx.Node, None] = {}
    fx.map_arg((call_of(node)[1], kwargs_of(node)), found.setdefault)
    return list(found)


def _work(node: fx.Node, values: Mapping[fx.Node, Any]) -> Work:
    target, args = call_of(node)
    args, kwargs = fx.map_arg((args, kwargs_of(node)), lambda n: values[n])
    return lambda: target(*args, **kwargs)


def _say(found: Mapping[str, float | str], nodes: Mapping[str, tuple[fx.Node, float]]) -> None:
    times = {k: ms for k, ms in found.items() if isinstance(ms, float)}
    log.info("timed %d of %d heavy operators", len(times), len(found))
    off = sorted(times, key=lambda k: -abs(times[k] - nodes[k][1]))
    for key in off[:5]:
        log.info("estimated %.3f ms, measured %.3f ms: %s", nodes[key][1], times[key], key)

"""Which values of a plan are a module's: by a suffix of its path, or a pattern."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatchcase

from fxoffload.plan_report.plan import Plan
from fxoffload.planner.plan import Decision


def values_of(plan: Plan, module: str) -> list[Decision]:
    """The decisions about values of a module and its submodules, each with the layers in which it is that module's.

    Args:
        plan: whose values have module paths.
        module: "mlp.gate_proj" is that module of each layer, "layers.3" one layer, "layers.*.mlp" a pattern.
    """
    found = []
    for decision in plan.decisions:
        values = decision.values or ((decision.value,) if decision.value else ())
        kept = [i for i, value in enumerate(values) if _is_in(path_of(value), module)]
        if len(kept) == len(values) and kept:
            found.append(decision)
        elif kept:
            found.append(
                replace(
                    decision,
                    layers=tuple(decision.layers[i] for i in kept if i < len(decision.layers)),
                    name=decision.names[kept[0]] if decision.names else decision.name,
                    names=tuple(decision.names[i] for i in kept if i < len(decision.names)),
                    value=values[kept[0]],
                    values=tuple(values[i] for i in kept),
                )
            )
    return found


def path_of(value: str) -> str:
    """The module path of a value's name; "" where there is no module: "aten.mm mm_4 [4] f32", "input primals_1"."""
    path, _, rest = value.partition(" ")
    return path if not rest or rest[0] in "[(" else ""


def near(plans: Iterable[Plan], module: str) -> str:
    """Up to three modules whose names, or whose values' names, are like ``module``, in words; where none is, three that
    there are; "" where no plan knows any."""
    names: dict[str, None] = {}
    others: dict[str, str] = {}  # whole paths, and names of values -> the module to ask for
    for plan in plans:
        for decision in plan.decisions:
            values = decision.values or (decision.value,)
            paths = [path for value in values if (path := path_of(value))]
            others.update(zip(paths, paths, strict=True))
            others.update(zip(decision.names, paths, strict=False) if len(paths) == len(decision.names) else ())
            parts = path_of(decision.value).split(".")
            # Without the numbers of layers: the rest is the same in each.
            last = max((i for i, part in enumerate(parts) if part.isdigit()), default=-1)
            for i in range(last + 1, len(parts)):
                names.update(dict.fromkeys((".".join(parts[last + 1 : i + 1]), parts[i])))
            names.update(dict.fromkeys([".".join(parts[: last + 1])] if last >= 0 else []))
    names.pop("", None)
    known = others | {name: name for name in names}
    like = difflib.get_close_matches(module, known, n=3, cutoff=0.5)
    if like:
        return f"did you mean {', '.join(dict.fromkeys(known[name] for name in like))}?"
    return f"there are {', '.join([*names][:3])}" if names else ""


def _is_in(path: str, module: str) -> bool:
    parts = path.split(".") if path else []
    outer = (".".join(parts[: i + 1]) for i in range(len(parts)))
    return any(fnmatchcase(p, module) or fnmatchcase(p, f"*.{module}") for p in outer)

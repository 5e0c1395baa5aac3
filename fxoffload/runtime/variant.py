"""Runs variants of a compiled graph: the same computation, with other values saved and others recomputed.

AOTAutograd knows one forward and one backward (variant 0), and calls the backward with the values that variant 0 saves.
A variant takes the arguments of variant 0 and returns as many values. So each call may run another one::

    variant 0    return (out,   primals_1, primals_2, mm,      gelu)        saves
    variant 1    return (out,   primals_1, <token>,   <empty>, <empty>)     the token's bundle: view, primals_5

A graph input that both save stays in its slot, where autograd itself notices that it was modified. So does a size,
where sizes vary. All else is in the bundle; the backward asks it which variant ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fxoffload.runtime.bundle import Bundle, bundle_of, bundle_token
from fxoffload.runtime.outer_program import OuterProgram
from fxoffload.runtime.transfer import Group
from fxoffload.step.choice import Choice


@dataclass(frozen=True)
class VariantLayout:
    """How the values of a variant lie in the slots of variant 0.

    Attributes:
        inputs: for each input of the variant's forward, its place among those of variant 0.
        num_user_outputs: leading results that the caller sees; they are the same.
        num_results: of variant 0's forward.
        direct: (place among the variant's results, slot among variant 0's) of values that stay in a slot.
        bundled: places among the variant's results of values that go into the bundle.
        carrier: the slot of the bundle's token.
        carried_to: the place of that slot among the arguments of variant 0's backward.
        carrier_name: name of the value that variant 0 saves there.
        arguments: for each input of the variant's backward, its place among the arguments of variant 0's backward, or
            -1 - k for the k-th value of the bundle.
        numbers: slots of sizes (where they vary) that the variant does not save.
    """

    inputs: tuple[int, ...]
    num_user_outputs: int
    num_results: int
    direct: tuple[tuple[int, int], ...]
    bundled: tuple[int, ...]
    names: tuple[str, ...]
    carrier: int
    carried_to: int
    carrier_name: str
    arguments: tuple[int, ...]
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Variant:
    """One variant, ready to run.

    Attributes:
        forward: its forward.
        order: for each ``OffloadCandidate`` of the forward, its place in ``Choice.offload``.
    """

    forward: OuterProgram
    backward: OuterProgram
    order: tuple[int, ...]
    layout: VariantLayout

    def arguments_of_forward(self, args: list[Any]) -> list[Any]:
        """The arguments of the forward, out of those of variant 0's: ``args``, which is cleared."""
        mine = [args[i] for i in self.layout.inputs]
        args.clear()
        return mine

    def saved(self, number: int, results: Sequence[Any], group: Group) -> tuple[list[Any], Tensor]:
        """The forward's results as variant 0 would return them, and the token among them."""
        layout = self.layout
        count = layout.num_user_outputs
        unused = torch.empty(0)
        found = [*results[:count], *[unused] * (layout.num_results - count)]
        for slot in layout.numbers:
            found[slot] = 0  # autograd keeps sizes apart from tensors
        for place, slot in layout.direct:
            found[slot] = results[place]
        bundle = Bundle(number, group, layout.names, [results[i] for i in layout.bundled])
        token = found[layout.carrier] = bundle_token(bundle)
        return found, token

    def arguments_of_backward(self, args: Sequence[Any], bundled: Sequence[Any]) -> list[Any]:
        """The arguments of the backward, out of those of variant 0's and the values of the bundle."""
        return [args[i] if i >= 0 else bundled[-1 - i] for i in self.layout.arguments]


class Variants:
    """The variants of one graph, by number from 1. One that is added may run at once."""

    def __init__(self) -> None:
        self._found: dict[int, Variant] = {}
        self._carriers: tuple[tuple[int, str], ...] = ()

    def add(self, number: int, variant: Variant) -> None:
        """``number`` may run from now on."""
        layout = variant.layout
        self._carriers = tuple(dict.fromkeys((*self._carriers, (layout.carried_to, layout.carrier_name))))
        self._found[number] = variant

    def get(self, number: int) -> Variant | None:
        """None for variant 0, and for one that is not compiled."""
        return self._found.get(number)

    def __contains__(self, number: object) -> bool:
        return number in self._found

    def in_order(self, choice: Choice) -> Choice:
        """The choice of a variant with its bools in the order of the forward's ``OffloadCandidate`` list."""
        variant = self.get(choice.variant)
        return choice if variant is None else replace(choice, offload=[choice.offload[i] for i in variant.order])

    def bundle_in(self, args: Sequence[Any]) -> Bundle | None:
        """The bundle of the call of a variant, in the arguments of variant 0's backward; None for a call of variant 0.

        Raises:
            TokenLostError: see ``bundle_of``.
        """
        return next((b for i, name in self._carriers if (b := bundle_of(args[i], name)) is not None), None)

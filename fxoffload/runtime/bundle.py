"""Values that a forward call of a variant saves without a slot of their own: a bundle, carried by one token.

AOTAutograd fixed the slots of saved values when the graph was compiled, and a variant saves other values. It puts them
into a ``Bundle``, and a token that owns the bundle into one of the slots. So a bundle lives exactly as long as the
values that autograd saved ([Note: Ownership] in ``fxoffload.runtime.transfer``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor

from fxoffload.runtime.transfer import Group, empty_token, is_token, slot_of
from fxoffload.torch_private.tensor_versions import version_of

_ATTRIBUTE = "_fxoffload_bundle"


class Bundle:
    """The values that one call saved.

    Attributes:
        variant: the number of the variant that ran.
        group: of the call; it may be empty.
    """

    def __init__(self, variant: int, group: Group, names: Sequence[str], values: Sequence[Any]) -> None:
        self.variant = variant
        self.group = group
        self._names = names
        # Detached: an output of the call would hold its graph, and so this bundle, and an input the caller's. Writes
        # to either are still seen in the version.
        self._values: list[Any] | None = [v.detach() if _is_value(v) else v for v in values]
        self._versions = [version_of(v) if _is_value(v) else None for v in values]

    def take(self, *, keeps_graph: bool) -> list[Any]:
        """The saved values. Unless the backward keeps the graph, the bundle drops them.

        Raises:
            RuntimeError: a value was modified since, or was taken before.
        """
        if self._values is None:
            raise RuntimeError(
                "expected what a forward saved for its backward, found that a backward took it already. Call the first "
                "one with retain_graph=True"
            )
        for name, value, version in zip(self._names, self._values, self._versions, strict=True):
            if version is not None and version_of(value) != version:
                raise RuntimeError(
                    f"expected {name}, a tensor of {list(value.shape)} that the forward saved for its gradient, at "
                    f"version {version}, found version {version_of(value)}: an operation modified it in place. Write "
                    "the result to another tensor, or modify it after the backward"
                )
        values = self._values
        if not keeps_graph:
            self._values = None
            return values
        return list(values)

    def __reduce__(self) -> NoReturn:
        # As of a transfer: two tokens would own the same values.
        raise TypeError("expected one owner of what a call saved, found an attempt to copy or pickle its token")


def _is_value(value: Any) -> bool:
    return isinstance(value, Tensor) and not is_token(value)


def bundle_token(bundle: Bundle) -> Tensor:
    """A tensor that stands for a bundle among the values that autograd saves."""
    token = empty_token()
    setattr(token, _ATTRIBUTE, bundle)
    return token


def bundle_of(value: Any, name: str) -> Bundle | None:
    """The bundle that ``value`` carries; None for any other saved value.

    Raises:
        TokenLostError: ``value`` has a token's form but lost the bundle that it stood for.
    """
    bundle = getattr(value, _ATTRIBUTE, None)
    if bundle is None:
        slot_of(value, name)
    return bundle

"""Gradients that leave, are dropped or must not be there, and backward passes that must not add to away gradients."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fxoffload.phases.guarding.overrides import remove_hook
from fxoffload.phases.inventory import Inventory


class Gradients:
    """How a ``PhaseManager`` treats gradients.

    Args:
        inventory: lists the tensors that may have gradients.
        policy: "keep", "drop" or "error".
        refuse: raises if a gradient is on the host; called before a backward adds to one.
    """

    def __init__(self, inventory: Inventory, policy: str, refuse: Callable[[], None]) -> None:
        self._inventory = inventory
        self._policy = policy
        self._refuse = refuse
        self._hooks: list[tuple[Tensor, Callable[[Tensor], None]]] = []

    def apply_policy(self, dropped: list[tuple[Tensor, Tensor]]) -> None:
        """Before gradients leave: drops them, or complains.

        Args:
            dropped: receives, before they are dropped, the pairs that ``restore`` needs if the rest fails.

        Raises:
            RuntimeError: there are some, and ``grads="error"``.
        """
        if self._policy == "keep":
            return
        owners = [(name, owner) for name, owner in self._inventory.walk().gradient_owners() if owner.grad is not None]
        if self._policy == "error" and owners:
            raise RuntimeError(
                f'expected no gradients (grads="error"), found {len(owners)}, the first of {owners[0][0]}: call '
                'optimizer.zero_grad(), or choose grads="keep" or "drop"'
            )
        dropped += [(owner, owner.grad) for _, owner in owners if owner.grad is not None]
        for _, owner in owners:
            owner.grad = None

    @staticmethod
    def restore(dropped: list[tuple[Tensor, Tensor]]) -> None:
        """They were dropped for an offload that failed."""
        for owner, gradient in dropped:
            if owner.grad is None:
                owner.grad = gradient

    def guard(self) -> None:
        """While gradients are away: autograd adds to ``.grad`` in C++, where no class stops it, so a hook does."""

        def refuse(gradient: Tensor) -> None:
            self._refuse()

        for _, owner in self._inventory.walk().gradient_owners():
            if owner.grad is not None and owner.requires_grad and owner.is_leaf:
                self._hooks.append((owner, refuse))  # before: it is taken away, wherever an exception comes
                owner.register_hook(refuse)

    def unguard(self) -> None:
        """They are back."""
        while self._hooks:
            owner, refuse = self._hooks[-1]
            remove_hook(owner._backward_hooks, refuse)
            self._hooks.pop()

    def still_used(self, tensors: list[Tensor]) -> bool:
        """Whether a backward may write to one: it is the ``.grad`` of something, or DDP's bucket, which DDP keeps."""
        ids = {id(tensor) for tensor in tensors}
        buckets = any(
            isinstance(module, DistributedDataParallel) and module.gradient_as_bucket_view
            for module in self._inventory.modules.values()
        )
        return buckets or any(id(owner.grad) in ids for _, owner in self._inventory.walk().gradient_owners())

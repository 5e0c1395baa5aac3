"""Gradients reduced to three float64 numbers each, so that processes can compare them without exchanging tensors."""

import torch
from torch.distributed.tensor import DTensor

from benchmarks.schema import Digest
from benchmarks.workloads import Job


def digest_gradients(job: Job, seed: int) -> dict[str, Digest]:
    """Sum, norm and a random projection per gradient; of the local shard where the gradient is a DTensor."""
    digests = {}
    for index, (name, leaf) in enumerate(sorted(job.leaves().items())):
        gradient = leaf.grad
        if gradient is None:
            raise AssertionError(f"expected a gradient for {name}, found none")
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        digests[name] = _digest(local, seed + index)
    return digests


@torch.no_grad()
def _digest(gradient: torch.Tensor, seed: int) -> Digest:
    """Rows are reduced in turn: a float64 copy of a whole embedding gradient would be 5 GB."""
    flat = gradient.reshape(-1)
    generator = torch.Generator(device=gradient.device).manual_seed(seed)
    totals = torch.zeros(3, dtype=torch.float64, device=gradient.device)
    for part in flat.split(1 << 25):
        values = part.double()
        directions = torch.randn(part.shape, generator=generator, device=gradient.device).double()
        totals += torch.stack([values.sum(), values.square().sum(), torch.dot(values, directions)])
    total, squares, probe = totals.tolist()
    return Digest(total, squares**0.5, probe)

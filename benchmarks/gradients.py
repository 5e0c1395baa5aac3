"""Gradients reduced to a few dozen numbers each, so that processes can compare them without exchanging tensors."""

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from benchmarks.gradients_compare import NUM_PARTS, pack_parts
from benchmarks.job import Job
from benchmarks.schema import Digest

# Elements: all norms' weights, and little to draw directions for.
SMALL = 1 << 14


def digest_gradients(job: Job, seed: int) -> dict[str, Digest]:
    """Sum, norm and random projections per gradient; of the local shard where the gradient is a DTensor."""
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
    """Rows are reduced in turn: a float64 copy of a whole embedding gradient would be 5 GB.

    Element i belongs to part i modulo ``NUM_PARTS``; each part is projected on its own elements of one direction. Of a
    small gradient, whose error may be in a few elements, a part is all of it on a direction of its own.
    """
    flat = gradient.reshape(-1)
    generator = torch.Generator(device=gradient.device).manual_seed(seed)
    if flat.numel() <= SMALL:
        return _digest_small(flat.double(), generator)
    totals = torch.zeros(2, dtype=torch.float64, device=gradient.device)
    parts = torch.zeros(NUM_PARTS, dtype=torch.float64, device=gradient.device)
    for rows in flat.split(1 << 25):
        values = rows.double()
        directions = torch.randn(rows.shape, generator=generator, device=gradient.device)
        totals += torch.stack([values.sum(), values.square().sum()])
        products = F.pad(values.mul_(directions), (0, -values.numel() % NUM_PARTS))
        parts += products.view(-1, NUM_PARTS).sum(0)
    total, squares = totals.tolist()
    projections = parts.tolist()
    return Digest(total, squares**0.5, sum(projections), pack_parts(projections))


def _digest_small(values: torch.Tensor, generator: torch.Generator) -> Digest:
    directions = torch.randn(NUM_PARTS, values.numel(), generator=generator, device=values.device)
    projections = (directions.double() @ values / NUM_PARTS**0.5).tolist()
    return Digest(values.sum().item(), values.norm().item(), sum(projections), pack_parts(projections))

"""Random models called in random orders: offloading changes no bit, and torch's own backend gives nearly the same.

Not eager: in some orders compiled code has other ``.grad`` than eager has, and decompositions round bf16 otherwise.
"""

from __future__ import annotations

import gc

import pytest
import torch
import torch._dynamo
from torch._functorch import config as functorch_config

import fxoffload
from tests.semantics.random_programs import Order, Program
from tests.support import Observed, assert_close, assert_equal, assert_nothing_held, compiled, effects

# policy, further options
WAYS = [("offload_all", {}), ("auto", {"profile": "h200"}), ("offload_all", {"recompute": "cheap"})]


def check(seed: int, orders: int) -> None:
    model = Program(seed)
    policy, options = WAYS[seed % len(WAYS)]
    call = compiled(model, policy=policy, **options)
    reference = torch.compile(model, backend="aot_eager_decomp_partition")
    before = {name: value.detach().clone() for name, value in model.state_dict().items()}
    with torch._dynamo.config.patch(recompile_limit=32):  # training, evaluation, gradients of inputs or not
        for order in (Order.random(1000 * seed + i) for i in range(orders)):

            def run(how: object, order: Order = order) -> Observed:
                model.load_state_dict(before)
                model.zero_grad(set_to_none=True)
                order.run(model, how)  # type: ignore[arg-type]
                return effects(model)

            offloaded = run(call)
            with fxoffload.override_policy("keep_all"):
                assert_equal(run(call), offloaded)
            assert_equal(run(call), offloaded)
            if not model.is_random:
                with functorch_config.patch(donated_buffer=False):  # gradients of gradients
                    assert_close(offloaded, run(reference), rtol=1e-3, atol=1e-3)
            gc.collect()
            assert_nothing_held()
    assert policy == "auto" or fxoffload.stats().bytes_offloaded > 0


@pytest.mark.slow_except("2")
@pytest.mark.parametrize("seed", range(6))
def test_random_programs_in_random_orders(seed: int) -> None:
    check(seed, orders=2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160))
def test_many_random_programs_in_random_orders(seed: int) -> None:
    check(seed, orders=4)

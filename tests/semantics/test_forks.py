"""A child that was forked in the middle of its parent's step, and trains the model itself."""

from __future__ import annotations

import os

import pytest
import torch

from tests.support import Stack, assert_equal, batch, compiled, rehearsal, train_step

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork"),
    pytest.mark.skipif(
        bool(torch.version.cuda or torch.version.hip),
        reason="a torch built for GPUs refuses the backward of a forked child once its parent ran one",
    ),
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),
]


@pytest.mark.slow_except("True")
@pytest.mark.parametrize("layer_by_layer", [False, True])
def test_a_child_trains_while_its_parents_backward_is_to_come(layer_by_layer: bool) -> None:
    """What its parent offloaded is predicted to be read next, and cannot be had there. The parent goes on with it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a child has none of its parent's, and would wait for them
    try:
        model = Stack(3)
        call = model
        if layer_by_layer:
            for layer in model.layers:
                layer.compile(backend="fxoffload", options=rehearsal())
        else:
            call = compiled(model)
        run = train_step(model, lambda: call(batch()).sum())
        expected = run()

        def fork(loss: torch.Tensor) -> None:
            pid = os.fork()
            if not pid:
                try:
                    assert_equal(run(), expected)
                    os._exit(0)
                except BaseException as error:  # nothing of pytest may go on in the child
                    os.write(2, f"{error!r}\n".encode())
                    os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            loss.backward()

        assert_equal(train_step(model, lambda: call(batch()).sum(), backward=fork)(), expected)
    finally:
        torch.set_num_threads(threads)

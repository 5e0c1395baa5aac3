"""Two devices: one process each under FSDP2, every layer compiled on its own; and both in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

import fxoffload
from fxoffload.runtime.copies.streams import Wait
from fxoffload.runtime.engine import CopyEngine, engine_for, engines
from tests.gpu.gpu_support import TOKENS, WIDTH, Block, Stack, deterministic, differing, disturbed, sleep
from tests.gpu.sharded_support import DEPTH, OPTIONS, Ended, check_bytes, check_equality, check_training, launch

pytestmark = [pytest.mark.gpu, pytest.mark.dist]

# Of the plans that train: half of the bytes of 8 layers, and a little more than they need under deterministic
# algorithms.
BUDGET = "220MiB"


# -- one process per device --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[True, False], ids=["reshard", "stay_unsharded"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    """What both ranks found, with ``reshard_after_forward`` on and off. They run once for all tests."""
    ended = launch(tmp_path_factory.mktemp("ranks"), reshard=request.param, budget=BUDGET)
    for rank, one in enumerate(ended):
        print(f"rank {rank}, exit status {one.code}:\n{one.log[-6000:]}")
    return ended


def test_every_rank_ends_well(ranks: list[Ended]) -> None:
    assert [one.code for one in ranks] == [0, 0], "\n".join(one.log[-3000:] for one in ranks)


def test_sharded_gradients_are_bit_equal_to_keeping(ranks: list[Ended]) -> None:
    for one in ranks:
        check_equality(one.found("equality"))


def test_every_sharded_byte_comes_back_and_nothing_is_held(ranks: list[Ended]) -> None:
    for one in ranks:
        found = one.found("equality")
        check_bytes(found)
        assert found["reloaded"] > found["offloaded"] // 2
        assert found["kept_host_full"] == 0


@pytest.mark.parametrize("phase", ["trained", "trained with variants"])
def test_weights_are_bit_equal_after_many_steps_of_a_plan(ranks: list[Ended], phase: str) -> None:
    """Each rank plans on its own; recomputation is the same on both sides."""
    for one in ranks:
        summary = check_training(one.found(phase))
        assert "no plan fits" not in summary
        assert ("recompute more" in summary) is (phase == "trained with variants")


@pytest.mark.parametrize("wait", [Wait.SOURCE_DONE, Wait.TARGET_READY])
def test_without_one_wait_sharded_gradients_are_wrong(ranks: list[Ended], wait: Wait) -> None:
    """The delays and the poison reach the copies of each rank: the equality above means something."""
    for one in ranks:
        found = one.found(f"without {wait.name}")
        assert found["wrong"] > 0
        assert found["after"] == 0
        assert (found["groups_on_tape"], found["host_bytes_in_use"]) == (0, 0)


def test_unsharded_parameters_stay(ranks: list[Ended]) -> None:
    """FSDP owns their memory: it frees and fills it between forward and backward."""
    matrices = sum(p.numel() * torch.bfloat16.itemsize for p in Block().parameters() if p.dim() > 1)
    for one in ranks:
        seen = one.found("parameters")
        assert seen["unsharded"] > 0
        assert seen["offloaded"] == 0
        assert one.found("deep")["bytes_kept_as_parameters"] >= matrices


def test_depth_adds_no_segments(ranks: list[Ended]) -> None:
    """One forward and one backward, for all layers of both models."""
    for one in ranks:
        shallow, deep = one.found("shallow"), one.found("deep")
        assert shallow == deep
        assert (deep["dynamo_graphs"], deep["segments"], deep["plain_graphs"]) == (1, 2, 0)


def test_a_layers_backward_prefetches_for_the_layer_below(ranks: list[Ended]) -> None:
    """Seen in the values that are there before a backward begins. Misses do not tell: it starts its own reloads, then
    counts."""
    for one in ranks:
        across, apart = one.found("across"), one.found("apart")
        for found in (across, apart):
            assert len(found["ahead"]) == DEPTH
            assert all(total > 0 for _, total in found["ahead"])
            assert found["ahead"][0][0] == 0, "nothing runs before the first backward"
            assert found["differing"] == 0
            assert (found["groups_on_tape"], found["host_bytes_in_use"]) == (0, 0)
        assert all(ready > 0 for ready, _ in across["ahead"][1:]), across["ahead"]
        assert all(ready == 0 for ready, _ in apart["ahead"]), apart["ahead"]


# -- one process, two devices ------------------------------------------------------------------------------------------

HOME, AWAY = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def at_home() -> Iterator[None]:
    """The current device is ``HOME``."""
    with torch.cuda.device(HOME), deterministic():
        yield


def _place() -> tuple[int, list[torch.cuda.Stream]]:
    """The current device, and the current stream of each."""
    return torch.cuda.current_device(), [torch.cuda.current_stream(d) for d in (HOME, AWAY)]


def _input(seed: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, TOKENS // 2, WIDTH, generator=generator).to(device, torch.bfloat16)


def _engine(device: torch.device) -> CopyEngine | None:
    """The engine of ``device``, if something made one."""
    return next((e for e in engines() if e.device == device), None)


def _pending(device: torch.device) -> tuple[int, int]:
    """Forward calls that wait for their backward, and the host bytes that they hold."""
    engine = _engine(device)
    return (0, 0) if engine is None else (len(engine.save_order), engine.host_bytes_in_use())


@contextlib.contextmanager
def _disturbed_on(devices: Sequence[torch.device], seed: int, left_out: Wait | None = None) -> Iterator[None]:
    """``disturbed`` for the engines of these devices; the current device stays."""
    with contextlib.ExitStack() as stack:
        for i, device in enumerate(devices):
            with torch.cuda.device(device):
                stack.enter_context(disturbed(seed + i, left_out=left_out))
                sleep(5.0)  # the host runs ahead of the device
        try:
            yield
        finally:
            for device in devices:
                torch.cuda.synchronize(device)


def _step(
    models: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor, between: Callable[[], None] | None = None
) -> list[Tensor]:
    """Loss, the input's gradient and all others of one step; the current device and streams stay as they are.

    ``between``: called between forward and backward.
    """
    models.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()  # a copy: offloaded and freed memory is poisoned
    before = _place()
    loss = call(x)
    assert _place() == before
    if between is not None:
        between()
    loss.backward()
    assert _place() == before
    assert x.grad is not None
    grads = [p.grad for p in models.parameters() if p.grad is not None]
    assert len(grads) == len(list(models.parameters()))
    return [loss.detach().clone(), x.grad.clone(), *(g.clone() for g in grads)]


def _keep(models: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    with fxoffload.override_policy("keep_all"):
        return _step(models, call, x)


def _assert_all_came_back() -> None:
    stats = fxoffload.stats()
    assert stats.bytes_offloaded > 0
    assert stats.bytes_reloaded + stats.bytes_reclaimed == stats.bytes_offloaded
    assert stats.bytes_reloaded > stats.bytes_offloaded // 2
    assert (stats.bytes_kept_host_full, dict(stats.calls_kept)) == (0, {})


@pytest.mark.usefixtures("at_home")
def test_a_model_on_another_device_than_the_current_one() -> None:
    torch.manual_seed(0)
    model = Stack().to(AWAY, torch.bfloat16)
    call = torch.compile(model, backend="fxoffload", options=OPTIONS)
    for seed in (1, 2):
        _step(model, call, _input(seed, AWAY))
    fxoffload.reset_stats()
    others = _pending(HOME)

    def between() -> None:
        groups, nbytes = _pending(AWAY)
        assert groups == 1
        assert nbytes > 0
        assert _pending(HOME) == others

    for seed in range(6):
        x = _input(100 + seed, AWAY)
        expected = _keep(model, call, x)
        with _disturbed_on([AWAY], seed):
            found = _step(model, call, x, between)
        assert all(g.device == AWAY and bool(g.isfinite().all()) for g in expected)
        assert differing(expected, found) == 0, f"schedule {seed}"
    _assert_all_came_back()
    assert (_pending(HOME), _pending(AWAY)) == (others, (0, 0))

    # The delays and the poison reach the copies of that device.
    wrong = 0
    for seed in range(3):
        x = _input(200 + seed, AWAY)
        expected = _keep(model, call, x)
        with _disturbed_on([AWAY], seed, left_out=Wait.SOURCE_DONE):
            wrong += differing(expected, _step(model, call, x)) > 0
        assert differing(expected, _step(model, call, x)) == 0
    assert wrong > 0


@pytest.mark.usefixtures("at_home")
def test_models_on_two_devices_take_turns_in_one_step() -> None:
    """Each device has an engine of its own: copies, host memory and save order."""
    torch.manual_seed(0)
    left, right = (nn.Sequential(Block(), Block()).to(d, torch.bfloat16) for d in (HOME, AWAY))
    both = nn.ModuleList([left, right])
    call_left, call_right = (torch.compile(m, backend="fxoffload", options=OPTIONS) for m in both)

    def call(x: Tensor) -> Tensor:
        # Through the host: the link between the two devices is not tested.
        for _ in range(2):
            x = call_left(x)
            x = call_right(x.cpu().to(AWAY)).cpu().to(HOME)
        return x.float().square().mean()

    for seed in (1, 2):
        _step(both, call, _input(seed, HOME))
    compiled = fxoffload.stats().num_segments_compiled
    fxoffload.reset_stats()
    assert engine_for(HOME) is not engine_for(AWAY)

    def between() -> None:
        for device in (HOME, AWAY):
            groups, nbytes = _pending(device)
            assert groups == 2
            assert nbytes > 0

    for seed in range(6):
        x = _input(100 + seed, HOME)
        expected = _keep(both, call, x)
        with _disturbed_on([HOME, AWAY], seed):
            found = _step(both, call, x, between)
        assert all(bool(g.isfinite().all()) for g in expected)
        assert differing(expected, found) == 0, f"schedule {seed}"
    assert compiled > 0
    assert fxoffload.stats().num_segments_compiled == 0, "flipping the decision must not compile"
    _assert_all_came_back()
    assert (_pending(HOME), _pending(AWAY)) == ((0, 0), (0, 0))

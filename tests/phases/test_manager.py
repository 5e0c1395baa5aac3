"""Offload and onload go unnoticed; tensors that are away cannot be used."""

from __future__ import annotations

import copy
import gc
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fxoffload.errors import OptionsError
from fxoffload.phases import OffloadedError, Phase, PhaseManager, Where, residue
from fxoffload.phases.guarding.sentinel import holdings_of
from fxoffload.phases.metrics import Transition
from fxoffload.phases.phase import GROUPS

from .delayed import DelayedCopies
from .phase_support import Tied, batch, differences, make, rehearse, snapshot, train

OPTIMIZERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {}),
    "fused": (torch.optim.AdamW, {"fused": True}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True, "foreach": True}),
    "loop": (torch.optim.AdamW, {"foreach": False}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nothing_is_noticed(name: str) -> None:
    kind, options = OPTIMIZERS[name]
    model, optimizer = make(Tied, kind, **options)
    reference, reference_optimizer = make(Tied, kind, **options)
    for i in range(2):
        train(model, optimizer, i, zero=False)
        train(reference, reference_optimizer, i, zero=False)
    before = snapshot(model, optimizer)
    manager = rehearse(model, optimizer)
    manager.offload()
    held = {id(h.storage): h.nbytes for h in manager._transit.ledger.held()}
    assert all(h.storage.nbytes() == 0 for h in manager._transit.ledger.held()), "memory is really given back"
    assert manager.image.in_use_bytes >= sum(held.values()) > 0
    manager.onload()
    assert differences(before, snapshot(model, optimizer)) == []
    for i in range(2, 7):
        assert train(model, optimizer, i) == train(reference, reference_optimizer, i)
    ours, theirs = snapshot(model, optimizer), snapshot(reference, reference_optimizer)
    for key, value in ours.items():
        if isinstance(value, tuple):
            assert all(torch.equal(a, b) for a, b in zip(value[-1], theirs[key][-1], strict=True)), key


def test_the_book_knows_what_it_holds_without_looking_at_everything() -> None:
    model, optimizer = make()
    train(model, optimizer, 0, zero=False)
    manager = rehearse(model, optimizer)
    ledger = manager._transit.ledger

    def check(*away: str) -> None:
        counted = {group for group in GROUPS if ledger.holds((group,))}
        assert counted == {h.group for h in ledger._held.values()} == set(away)

    check()
    manager.offload("optimizer", "params")
    check("optimizer", "params")
    manager.offload("optimizer")  # again
    manager.onload("params")
    check("optimizer")
    manager.offload("grads")
    check("optimizer", "grads")
    for parameter in model.parameters():
        parameter.grad = None
    manager.onload("optimizer", "grads")  # the dead ones are dropped
    check()
    train(model, optimizer, 1)
    manager.offload()
    manager.onload()
    check()
    manager.close()


def test_a_hundred_cycles() -> None:
    model, optimizer = make()
    train(model, optimizer, 0)
    before = snapshot(model, optimizer)
    manager = rehearse(model, optimizer)
    manager.offload()
    manager.onload()
    reserved, in_use = manager.image.reserved_bytes, manager.image.in_use_bytes
    for _ in range(99):
        manager.offload()
        manager.onload()
    assert differences(before, snapshot(model, optimizer)) == []
    assert (manager.image.reserved_bytes, manager.image.in_use_bytes) == (reserved, in_use)


def test_steps_with_phases() -> None:
    model, optimizer = make()
    reference, reference_optimizer = make()
    manager = rehearse(model, optimizer)
    for i in range(4):
        manager.enter("rollout")
        assert {group: manager.where(group) for group in ("params", "buffers")} == dict.fromkeys(
            ("params", "buffers"), Where.HOST
        )
        with manager.phase("logprob"), torch.no_grad():
            model.eval()
            reference.eval()
            assert torch.equal(model(batch(i)), reference(batch(i)))
            model.train()
            reference.train()
            assert manager.where("optimizer") is (Where.HOST if i else Where.DEVICE)
        with manager.phase("train", then="sync"):
            assert train(model, optimizer, i) == train(reference, reference_optimizer, i)
        with manager.phase("sync"):
            assert manager.where("params") is Where.DEVICE
            assert manager.where("optimizer") in (Where.LEAVING, Where.HOST)


USES = """forward functional step clip_norm clip_value add radd in_place out clone item state gradient numpy pointer
storage save_model save save_state deepcopy dtype stack foreach""".split()  # noqa: SIM905


def use(model: nn.Module, optimizer: Any) -> dict[str, Callable[[], object]]:
    weight = model.get_parameter("first.weight")
    state = optimizer.state[weight]["exp_avg"]
    return {
        "forward": lambda: model(batch(0)),
        "functional": lambda: torch.func.functional_call(model, {}, (batch(0),)),
        "step": lambda: optimizer.step(),
        "clip_norm": lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        "clip_value": lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        "add": lambda: weight + 1,
        "radd": lambda: 1 + weight,
        "in_place": lambda: weight.data.add_(1),
        "out": lambda: torch.add(batch(0), 1, out=weight),
        "clone": lambda: weight.clone(),
        "item": lambda: weight[0, 0].item(),
        "state": lambda: state * 2,
        "gradient": lambda: weight.grad + 1,  # type: ignore[operator]
        "numpy": lambda: weight.detach().numpy(),
        "pointer": lambda: weight.data_ptr(),
        "storage": lambda: weight.untyped_storage(),
        "save_model": lambda: torch.save(model, io.BytesIO()),
        "save": lambda: torch.save(weight, io.BytesIO()),
        "save_state": lambda: torch.save(state, io.BytesIO()),
        "deepcopy": lambda: copy.deepcopy(model),
        "dtype": lambda: model.to(torch.float64),
        "stack": lambda: torch.stack([weight, weight]),
        "foreach": lambda: torch._foreach_norm([weight]),
    }


@pytest.mark.parametrize("name", USES)
def test_what_is_away_cannot_be_used(name: str) -> None:
    model, optimizer = make()
    train(model, optimizer, 0, zero=False)
    before = snapshot(model, optimizer)
    uses = use(model, optimizer)
    assert sorted(uses) == sorted(USES)
    manager = rehearse(model, optimizer)
    manager.enter("rollout")
    with pytest.raises(OffloadedError, match=r"but it is offloaded: phase rollout; .* Call onload\('\w+'\) or enter"):
        uses[name]()
    manager.enter("train").wait()
    assert differences(before, snapshot(model, optimizer)) == []
    uses["forward"]()


def test_what_is_away_says_so_and_answers_questions_about_its_form() -> None:
    model, optimizer = make()
    weight = model.get_parameter("first.weight")
    manager = rehearse(model, optimizer)
    manager.offload("params")
    assert isinstance(weight, nn.Parameter) and weight.shape == (24, 24) and weight.requires_grad
    assert weight.device == torch.device("cpu") and weight.numel() == 576 and weight.is_contiguous()
    assert "host" in repr(weight) and "see fxoffload.phases" in f"{weight}"
    assert len(list(model.parameters())) == len(list(optimizer.param_groups[0]["params"])) + 1
    optimizer.zero_grad()
    manager.close()
    assert "tensor(" in repr(weight)


def test_arriving_tensors_are_fenced_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxoffload.phases.moving.mover.AT_ONCE", 1)  # a copy for each, though they are small
    copies = DelayedCopies()
    model, optimizer = make()
    reference, _ = make()
    manager = rehearse(model, optimizer, copies=copies)
    manager.offload()
    handle = manager.onload(wait=False)
    assert not handle.done() and manager.where("params") is Where.ARRIVING
    total = len(copies._queue)
    first = model.get_parameter("first.weight")
    assert torch.equal(first + 0, reference.get_parameter("first.weight") + 0)
    assert 0 < copies.num_made < total, "only what was needed has arrived"
    model.eval()
    reference.eval()
    assert torch.equal(model(batch(0)), reference(batch(0)))
    copies.run_all()
    handle.wait()
    assert manager.where("params") is Where.DEVICE and handle.done()


def test_the_optimizer_is_waited_for_by_its_step() -> None:
    copies = DelayedCopies()
    model, optimizer = make()
    reference, reference_optimizer = make()
    manager = rehearse(model, optimizer, copies=copies)
    train(model, optimizer, 0)
    train(reference, reference_optimizer, 0)
    manager.enter("rollout")
    manager.enter("train")
    loss = model(batch(1))
    loss.backward()
    assert manager.where("optimizer") is Where.ARRIVING, "the forward and the backward have not waited for it"
    optimizer.step()
    reference(batch(1)).backward()
    reference_optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


@pytest.mark.parametrize("how", ["layers", "whole", "given"])
def test_compiled_models_wait_and_are_not_compiled_again(how: str) -> None:
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters["stats"]

    def build() -> tuple[nn.Module, Any, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(24, 24), nn.GELU()) for _ in range(3)))
        if how == "layers":
            for layer in model:
                layer.compile(backend="aot_eager")
            return model, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        call = torch.compile(model, backend="aot_eager")
        return model, call, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    model, call, optimizer = build()
    _, reference, reference_optimizer = build()
    for one, by in ((call, optimizer), (reference, reference_optimizer)):
        train(lambda x, one=one: one(x).square().mean(), by, 0)
        with torch.no_grad():
            one(batch(0))
    compiled = counters["unique_graphs"]
    copies = DelayedCopies()
    manager = rehearse(call if how == "given" else model, optimizer, copies=copies)
    for i in range(1, 4):
        manager.enter("rollout")
        with pytest.raises(OffloadedError, match="offloaded"):
            call(batch(0))
        manager.enter("logprob")
        with torch.no_grad():
            assert torch.equal(call(batch(i)), reference(batch(i)))
        manager.enter("train")
        assert train(lambda x: call(x).square().mean(), optimizer, i) == train(
            lambda x: reference(x).square().mean(), reference_optimizer, i
        )
    assert counters["unique_graphs"] == compiled


class TestGradients:
    def test_kept(self) -> None:
        model, optimizer = make()
        train(model, optimizer, 0, zero=False)
        before = snapshot(model, optimizer)
        manager = rehearse(model, optimizer, grads="keep")
        manager.enter("rollout")
        manager.enter("train").wait()
        assert differences(before, snapshot(model, optimizer)) == []

    def test_dropped(self) -> None:
        model, optimizer = make()
        train(model, optimizer, 0, zero=False)
        manager = rehearse(model, optimizer, grads="drop")
        manager.enter("logprob")
        assert all(p.grad is None for p in model.parameters())

    def test_an_error(self) -> None:
        model, optimizer = make()
        train(model, optimizer, 0, zero=False)
        before = snapshot(model, optimizer)
        manager = rehearse(model, optimizer, grads="error")
        with pytest.raises(RuntimeError, match=r"expected no gradients .* found 8.*zero_grad"):
            manager.enter("rollout")
        assert differences(before, snapshot(model, optimizer)) == []
        assert manager.phase_now is None and manager.where("params") is Where.DEVICE

    def test_a_backward_does_not_add_to_what_is_away(self) -> None:
        model, optimizer = make()
        train(model, optimizer, 0, zero=False)
        before = snapshot(model, optimizer)
        manager = rehearse(model, optimizer)
        loss = model.get_parameter("left").sum()
        manager.offload("grads")
        with pytest.raises(OffloadedError, match="backward needs"):
            loss.backward()
        with pytest.raises(OffloadedError, match="grads"):
            model(batch(0))
        manager.onload("grads")
        assert differences(before, snapshot(model, optimizer)) == []

    def test_set_to_none_while_away(self) -> None:
        model, optimizer = make()
        train(model, optimizer, 0, zero=False)
        manager = rehearse(model, optimizer)
        manager.offload("grads")
        optimizer.zero_grad(set_to_none=True)
        model(batch(0)).backward()
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
        manager.onload()


class TestStates:
    def test_repeated_calls_do_nothing(self) -> None:
        model, optimizer = make()
        train(model, optimizer, 0)
        manager = rehearse(model, optimizer)
        manager.onload()
        manager.offload("params")
        manager.metrics()
        for _ in range(3):
            manager.offload("params")
        assert [t.nbytes for t in manager.transitions] == [0, 0, 0]
        assert all(t.seconds == 0.0 and t.exposed_seconds == 0.0 for t in manager.transitions)
        manager.onload()
        manager.metrics()
        manager.onload()
        assert manager.metrics()["phases/onload/seconds"] == 0.0

    def test_onload_waits_for_what_is_leaving(self) -> None:
        model, optimizer = make()
        train(model, optimizer, 0)
        before = snapshot(model, optimizer)
        manager = rehearse(model, optimizer)
        for _ in range(20):
            manager.offload(wait=False)
            manager.onload(wait=False)
        manager.onload().wait()
        assert differences(before, snapshot(model, optimizer)) == []

    def test_offload_of_what_arrives(self) -> None:
        model, optimizer = make()
        train(model, optimizer, 0)
        before = snapshot(model, optimizer)
        manager = rehearse(model, optimizer, copies=DelayedCopies())
        for _ in range(5):
            manager.offload()
            manager.onload(wait=False)
        manager.offload()
        assert manager.where("params") is Where.HOST
        manager.onload(wait=False)
        manager.fence_group("params")
        for group in GROUPS:
            manager.fence_group(group)
        assert differences(before, snapshot(model, optimizer)) == []

    def test_threads(self) -> None:
        model, optimizer = make()
        train(model, optimizer, 0)
        before = snapshot(model, optimizer)
        manager = rehearse(model, optimizer)
        failed: list[BaseException] = []

        def work(seed: int) -> None:
            try:
                for i in range(25):
                    groups = GROUPS[(i + seed) % len(GROUPS)]
                    (manager.offload if (i * seed) % 2 else manager.onload)(groups, wait=bool(i % 3))
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == []
        manager.onload()
        assert differences(before, snapshot(model, optimizer)) == []

    def test_unknown_names(self) -> None:
        manager = rehearse(*make())
        with pytest.raises(ValueError, match=r"expected groups out of .*'params', found 'weights'"):
            manager.offload("weights")
        with pytest.raises(ValueError, match="expected one of the phases 'rollout'"):
            manager.enter("generate")
        with pytest.raises(ValueError, match='expected grads="keep"'):
            rehearse(*make(), grads="move")
        with pytest.raises(TypeError, match=r"expected an nn\.Module"):
            rehearse([1])
        with pytest.raises(TypeError, match="expected an optimizer"):
            rehearse(make()[0], 3)

    def test_release_while_offloaded(self) -> None:
        model, optimizer = make()
        manager = rehearse(model, optimizer)
        manager.offload("params")
        with pytest.raises(RuntimeError, match=r"found no phase entered; params host .*call onload\(\)"):
            manager.release_host_memory()
        manager.onload()
        assert manager.release_host_memory() > 0
        assert manager.image.reserved_bytes == 0
        manager.offload()
        manager.close()


class _Breaks(DelayedCopies):
    """Copies until it is told to break."""

    left = 1 << 30

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("the copy broke")

    def offload(self, pieces: Any, *, gives_way: bool = True) -> None:
        self._count()
        super().offload(pieces)

    def reload(self, pieces: Any, *, gives_way: bool = True) -> Any:
        self._count()
        return super().reload(pieces)


class TestFailures:
    @pytest.mark.parametrize("after", [0, 1, 5, 11])
    def test_an_offload_that_breaks_puts_everything_back(self, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("fxoffload.phases.moving.mover.AT_ONCE", 1)
        model, optimizer = make()
        train(model, optimizer, 0, zero=False)
        before = snapshot(model, optimizer)
        copies = _Breaks()
        manager = rehearse(model, optimizer, copies=copies)
        copies.left = after
        # Whoever rolls back needs the link again.
        broken = manager.offload(wait=False)
        copies_run = threading.Timer(0.05, copies.run_all)
        copies_run.start()
        copies.left = min(copies.left, 1 << 30)
        with pytest.raises(RuntimeError, match="the copy broke"):
            broken.wait()
        copies.left = 1 << 30
        manager.onload(wait=False)
        for group in GROUPS:
            manager.fence_group(group)
        manager.onload()
        assert differences(before, snapshot(model, optimizer)) == []
        assert manager.transitions[0].failed

    @pytest.mark.parametrize("after", [0, 1, 5])
    def test_an_onload_that_breaks_leaves_everything_on_the_host(self, after: int) -> None:
        model, optimizer = make()
        train(model, optimizer, 0, zero=False)
        before = snapshot(model, optimizer)
        copies = _Breaks()
        manager = rehearse(model, optimizer, copies=copies)
        manager.offload()
        copies.left = after
        with pytest.raises(RuntimeError, match="the copy broke"):
            manager.onload()
        assert all(manager.where(group) is Where.HOST for group in GROUPS if group != "extra")
        with pytest.raises(OffloadedError):
            model(batch(0))
        copies.left = 1 << 30
        manager.onload(wait=False)
        for group in GROUPS:
            manager.fence_group(group)
        manager.onload()
        assert differences(before, snapshot(model, optimizer)) == []


def test_extra_tensors_and_several_models() -> None:
    actor, optimizer = make()
    critic, critic_optimizer = make()
    average = {name: p.detach().clone() for name, p in actor.named_parameters()}
    manager = rehearse({"actor": actor, "critic": critic}, [optimizer, critic_optimizer], extra={"ema": average})
    expected = {name: t.clone() for name, t in average.items()}
    manager.enter("rollout")
    assert manager.where("extra") is Where.HOST
    with pytest.raises(OffloadedError, match=r"ema\.\d+ .* of the extra"):
        average["left"] + 1
    manager.enter(Phase.TRAIN).wait()
    assert all(torch.equal(t, expected[name]) for name, t in average.items())
    assert set(manager.models) == {"actor", "critic"}


def test_it_lives_as_long_as_something_is_away() -> None:
    model, optimizer = make()
    before = snapshot(model, optimizer)
    rehearse(model, optimizer).offload()
    gc.collect()
    with pytest.raises(OffloadedError):
        model(batch(0))
    transit: Any = holdings_of(next(model.parameters()))[0].owner
    transit.onload(Transition("onload", GROUPS), at_once=True).wait()
    assert differences(before, snapshot(model, optimizer)) == []


def test_host_copies() -> None:
    model, optimizer = make()
    train(model, optimizer, 0)
    manager = rehearse(model, optimizer)
    expected = {name: t.detach().clone() for name, t in model.state_dict(keep_vars=True).items()}
    at_home = {name: manager.host_copy(t) for name, t in model.named_parameters()}
    manager.offload()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found = manager.host_copy(tensor)
        with torch._C.DisableTorchFunctionSubclass():
            assert found.stride() == tensor.stride()
        if name in expected:
            assert torch.equal(found, expected[name]), name
    assert all(torch.equal(t, expected[name]) for name, t in at_home.items())
    manager.close()


def test_metrics() -> None:
    model, optimizer = make()
    train(model, optimizer, 0)
    manager = rehearse(model, optimizer)
    nbytes = sum(h.nbytes for h in manager._transit.ledger.storages())
    manager.enter("rollout")
    manager.enter("train").wait()
    found = manager.metrics()
    assert found["phases/offload/bytes"] == found["phases/onload/bytes"] == nbytes
    assert found["phases/offload/freed_bytes"] == nbytes
    assert found["phases/offload/seconds"] > 0 and found["phases/offload/gb_per_s"] > 0
    assert 0 < found["phases/rollout/switch_seconds"] < 10
    assert found["phases/sync/switch_seconds"] == 0.0 and found["phases/stream/seconds"] == 0.0
    assert set(manager.metrics().values()) <= {0.0, float(manager.image.reserved_bytes)}
    assert all(isinstance(value, float) for value in found.values())


def test_a_manager_is_a_context() -> None:
    model, optimizer = make()
    with PhaseManager(model, optimizer, device_types=("cpu",)) as manager:
        manager.enter("rollout")
    model(batch(0))
    assert manager.image.reserved_bytes == 0


@pytest.mark.parametrize("wrong", ["cpu", "cuda", ("gpu",), ("CPU",), ("cpu:0",), (), None, (0,)])
def test_device_types_that_are_none(wrong: Any) -> None:
    """A bare name would be taken apart into letters, and nothing would leave."""
    for made in (lambda: PhaseManager(nn.Linear(2, 2), device_types=wrong), lambda: residue(device_types=wrong)):
        with pytest.raises(OptionsError, match=r"expected (a tuple of names|one or more)"):
            made()

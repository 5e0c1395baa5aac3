from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fxoffload.errors import TokenLostError
from fxoffload.runtime.copies.streams import HostCopies
from fxoffload.runtime.engine import Budgets, CopyEngine
from fxoffload.runtime.host_memory.arena import HeapMemory, HostArena
from fxoffload.runtime.transfer import Group, Slot, Transfer, View, make_token, slot_of

CPU = torch.device("cpu")


def make_arena() -> HostArena:
    return HostArena(HeapMemory(), 1 << 26)


def make_transfer(arena: HostArena, nbytes: int = 64) -> Transfer:
    view = View(torch.float32, (4,), (1,), 0)
    block = arena.allocate(nbytes, 1 << 26)
    assert block is not None
    return Transfer(nbytes, block, [view], reclaimable=True)


def make_slot(arena: HostArena | None = None) -> Slot:
    group, transfer = Group(), make_transfer(arena or make_arena())
    group.add(0, transfer)
    return Slot(group, transfer, transfer.views[0])


def test_the_tokens_own_the_block() -> None:
    """Token -> slot -> group -> transfer -> block: the block returns with the last token, and not before."""
    arena = make_arena()
    slot = make_slot(arena)
    other = Slot(slot.group, slot.transfer, slot.view)
    tokens = [make_token(slot), make_token(other)]
    group = weakref.ref(slot.group)
    del slot, other
    assert group() is not None
    del tokens[0]
    gc.collect()
    assert arena.in_use_bytes == 512
    tokens.clear()  # by reference counting: no collector is needed
    assert group() is None
    assert arena.in_use_bytes == 0


def test_what_was_reloaded_for_nothing_is_held_until_its_copy_was_waited_for() -> None:
    engine = CopyEngine(CPU, HostCopies(), make_arena())
    group = Group()
    (transfer,) = engine.offload([[torch.ones(4)]], Budgets(1 << 26, 0, 0), reclaimable=False)
    assert transfer is not None
    engine.release(0)
    group.add(0, transfer)
    engine.request(group, keeps_graph=False, prefetch=True, across_graphs=True)
    engine.prefetch(64)
    assert transfer.there is not None
    buffer, fence = weakref.ref(transfer.there.buffer), transfer.block.fence
    del transfer, group
    assert buffer() is not None
    engine.drop_abandoned()
    assert buffer() is None
    block = engine.arena.allocate(512, 1 << 26)
    assert block is not None and block.fence == fence is not None


def test_a_token_is_a_tensor_that_stands_for_its_slot() -> None:
    """AOTAutograd asserts that every saved value is a tensor."""
    slot = make_slot()
    token = make_token(slot)
    assert isinstance(token, Tensor)
    assert (token.numel(), token.device, token.requires_grad) == (0, CPU, False)
    assert slot_of(token, "mm") is slot


def test_a_token_survives_being_saved_by_autograd() -> None:
    class Save(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, token: Tensor) -> Tensor:
            ctx.save_for_backward(token)
            return x.clone()

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
            (token,) = ctx.saved_tensors  # type: ignore[attr-defined]
            found.append(slot_of(token, "x"))
            return grad, None

    found: list[Slot | None] = []
    slot = make_slot()
    x = torch.ones(2, requires_grad=True)
    Save.apply(x, make_token(slot)).sum().backward()  # type: ignore[no-untyped-call]
    assert found == [slot]


@pytest.mark.parametrize(
    "value", [torch.ones(3), torch.empty(0), torch.empty(0, dtype=torch.uint8), torch.empty(3, 0, 7919), 7, None]
)
def test_what_is_no_token_is_a_value(value: object) -> None:
    assert slot_of(value, "mm") is None


@pytest.mark.parametrize("how", ["deepcopy", "clone", "detach", "empty_like"])
def test_a_copy_of_a_token_has_lost_what_it_stood_for(how: str) -> None:
    token = make_token(make_slot())
    with torch.no_grad():
        lost = {
            "deepcopy": lambda: copy.deepcopy(token.data),
            "clone": token.clone,
            "detach": token.detach,
            "empty_like": lambda: torch.empty_like(token),
        }[how]()
    with pytest.raises(TokenLostError, match=r"expected the saved value mm or the token .* saved-tensor hook"):
        slot_of(lost, "mm")


@pytest.mark.parametrize("how", [copy.deepcopy, pickle.dumps])
def test_a_token_has_one_owner(how: Callable[[Tensor], object]) -> None:
    """A deep copy would free the block twice."""
    arena = make_arena()
    token = make_token(make_slot(arena))
    with pytest.raises(TypeError, match="one owner of an offloaded value"):
        how(token)
    assert arena.in_use_bytes == 512
    del token
    assert arena.in_use_bytes == 0


def test_groups_ask_for_what_is_needed_first() -> None:
    group = Group()
    arena = make_arena()
    transfers = [make_transfer(arena) for _ in range(4)]
    for rank, transfer in zip((2, 0, 1, 0), transfers, strict=True):
        group.add(rank, transfer)
    assert group.in_need_order() == [transfers[1], transfers[3], transfers[2], transfers[0]]
    assert len(group) == 4


BASE = torch.arange(240, dtype=torch.float32).view(4, 6, 10)
LAYOUTS = {
    "contiguous": BASE,
    "transposed": BASE.transpose(0, 2),
    "sliced": BASE[1:3, 2:4],
    "one row": BASE[2, 3],
    "expanded": BASE[:1, :1].expand(5, 7, 10),
    "gaps": BASE[:, ::2, ::3],
    "scalar": BASE[3, 5, 9],
    "int64": torch.arange(33)[5:],
    "bool": torch.arange(40)[3:] % 3 == 0,
    "bfloat16": BASE.to(torch.bfloat16)[1:, :, 3:7],
    "complex": torch.randn(5, 6, dtype=torch.complex64).t()[2:],
    "empty": BASE[:0],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_any_layout_comes_back_as_it_was(name: str) -> None:
    value = LAYOUTS[name]
    engine = CopyEngine(CPU, HostCopies(), HostArena(HeapMemory(), 1 << 26))
    (transfer,) = engine.offload([[value]], Budgets(1 << 26, 0, 0), reclaimable=False)
    assert transfer is not None
    (buffer,) = engine.take([transfer])
    back = transfer.views[0].on(buffer)
    assert torch.equal(back, value)
    assert (back.stride(), back.dtype, back.shape) == (value.stride(), value.dtype, value.shape)
    # The storage's start is not copied, the alignment of the tensor within it is kept.
    assert transfer.nbytes <= value.numel() * value.element_size() * 8 + 64
    assert (back.data_ptr() - value.data_ptr()) % 16 == 0


def test_views_of_one_storage_share_one_copy_and_one_buffer() -> None:
    base = torch.randn(8, 16)
    views = [base[2:4], base[4:6].t(), base[2:6].view(-1)]
    engine = CopyEngine(CPU, HostCopies(), HostArena(HeapMemory(), 1 << 26))
    (transfer,) = engine.offload([views], Budgets(1 << 26, 0, 0), reclaimable=False)
    assert transfer is not None
    assert transfer.nbytes == 4 * 16 * 4
    (buffer,) = engine.take([transfer])
    back = [view.on(buffer) for view in transfer.views]
    assert all(torch.equal(a, b) for a, b in zip(back, views, strict=True))
    assert len({b.untyped_storage().data_ptr() for b in back}) == 1


def test_a_view_with_another_dtype_shares_the_copy_too() -> None:
    base = torch.randn(8, 16)
    views = [base[1:3], base.view(torch.int16)[2:4]]
    engine = CopyEngine(CPU, HostCopies(), HostArena(HeapMemory(), 1 << 26))
    (transfer,) = engine.offload([views], Budgets(1 << 26, 0, 0), reclaimable=False)
    assert transfer is not None
    (buffer,) = engine.take([transfer])
    assert all(torch.equal(view.on(buffer), value) for view, value in zip(transfer.views, views, strict=True))

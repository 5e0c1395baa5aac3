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
from fxoffload.runtime.host_memory.arena import Fence, HeapMemory, HostArena, HostBlock
from fxoffload.runtime.transfer import Group, Remains, Slot, Transfer, View, make_token, slot_of

CPU = torch.device("cpu")


def make_transfer(grave: list[Remains], nbytes: int = 64) -> Transfer:
    view = View(torch.float32, (4,), (1,), 0)
    return Transfer(nbytes, HostBlock(0, 512, None), None, [view], reclaimable=True, bury=grave.append)


def make_slot(grave: list[Remains]) -> Slot:
    group, transfer = Group(), make_transfer(grave)
    group.add(0, transfer)
    return Slot(group, transfer, transfer.views[0])


def test_the_tokens_own_the_block() -> None:
    """Token -> slot -> group -> transfer -> block: the block returns with the last token, and not before."""
    grave: list[Remains] = []
    slot = make_slot(grave)
    other = Slot(slot.group, slot.transfer, slot.view)
    tokens = [make_token(slot), make_token(other)]
    group = weakref.ref(slot.group)
    del slot, other
    assert group() is not None
    del tokens[0]
    gc.collect()
    assert not grave
    tokens.clear()  # by reference counting: no collector is needed
    assert group() is None
    (remains,) = grave
    assert (remains.block.nbytes, remains.buffer, remains.fence) == (512, None, None)


def test_what_was_reloaded_for_nothing_is_left_behind_with_the_block() -> None:
    grave: list[Remains] = []
    transfer = make_transfer(grave)
    transfer.buffer, transfer.ready, transfer.ahead_bytes = torch.empty(64, dtype=torch.uint8), "event", 64
    transfer.fence = Fence(3, "event")
    buffer = transfer.buffer
    del transfer
    (remains,) = grave
    assert remains.buffer is buffer
    assert (remains.ready, remains.ahead_bytes, remains.fence) == ("event", 64, Fence(3, "event"))


def test_a_token_is_a_tensor_that_stands_for_its_slot() -> None:
    """AOTAutograd asserts that what is saved is a tensor."""
    slot = make_slot([])
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
    slot = make_slot([])
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
    token = make_token(make_slot([]))
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
    grave: list[Remains] = []
    token = make_token(make_slot(grave))
    with pytest.raises(TypeError, match="one owner of an offloaded value"):
        how(token)
    assert not grave
    del token
    assert len(grave) == 1


def test_groups_ask_for_what_is_needed_first() -> None:
    group = Group()
    transfers = [make_transfer([]) for _ in range(4)]
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

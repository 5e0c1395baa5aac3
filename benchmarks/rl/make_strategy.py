"""A variant's strategy by its kind."""

from __future__ import annotations

from benchmarks.rl.ours import Fxoffload
from benchmarks.rl.peers import MemorySaver, ModuleTo, Packed, PerTensor
from benchmarks.rl.strategy import Strategy
from benchmarks.rl.verl_checkout import VerlCheckout
from benchmarks.schema import Variant


def make_strategy(variant: Variant) -> Strategy:
    if variant.kind == "fxoffload":
        return Fxoffload(variant.options)
    if variant.kind == "verl_checkout":
        return VerlCheckout(str(variant.options.get("path", "")))
    return {
        "verl": lambda: PerTensor(pinned=True),
        "pageable": lambda: PerTensor(pinned=False),
        "packed": Packed,
        "module_to": ModuleTo,
        "torch_memory_saver": MemorySaver,
        "none": Strategy,
    }[variant.kind]()

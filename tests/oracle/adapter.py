"""The oracle's contact with internals. Where a refactoring moves one of them, this is the only file to change.

Everything else in this folder uses public names (``fxoffload.plan``, ``torch.compile``, ``fxoffload.plans``).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

import fxoffload
from fxoffload import BudgetError, Plan
from fxoffload.compiler import chain_planning, measured_costs, plan_ahead, plan_chain, plan_of_graph, planning, session
from fxoffload.compiler.measuring import Allowance
from fxoffload.compiler.recalibrate_chain import ChainRecalibration
from fxoffload.compiler.recalibrate_graph import GraphRecalibration
from fxoffload.compiler.replan import Replan
from fxoffload.machine import op_times
from fxoffload.machine.meters import HostMeter, Work
from fxoffload.planner.chain import Chain
from fxoffload.planner.objective import Objective
from fxoffload.planner.schedule import Schedule
from fxoffload.planner.simulate import simulate
from fxoffload.runtime import engine as engine_module
from fxoffload.runtime import outer_program
from fxoffload.runtime.copies.streams import HostCopies, Wait
from fxoffload.runtime.engine import Budgets, CopyEngine, engine_for
from fxoffload.runtime.host_memory.arena import HeapMemory, HostArena, HostBlock
from fxoffload.runtime.profiler.allocator_trace import Block, Memory
from fxoffload.runtime.profiler.first_arguments import OnOtherStreams
from fxoffload.runtime.profiler.step_clock import StepClock
from fxoffload.runtime.profiler.stream_events import host_events
from fxoffload.runtime.transfer import Group, Transfer, Watch
from fxoffload.step.choice import Choice
from fxoffload.step.choice import Windows as Windows
from tests.oracle.models import Step

CPU = torch.device("cpu")
Options = Mapping[str, Any]


# -- plans ahead -------------------------------------------------------------------------------------------------------


def plans_ahead(step: Step, objectives: Sequence[Options], **common: Any) -> list[Plan | BudgetError]:
    """``fxoffload.plan(step, **common, **objective)`` for each objective. The model is traced once, and each recompute
    choice partitioned once: that takes most of a plan's time."""
    found: list[Plan | BudgetError] = []
    plan_graph, plan_step, make_partitioning = (
        session.CompileSession._plan,
        plan_ahead.plan_fake_step,
        planning.make_partitioning,
    )
    partitionings: dict[Any, Any] = {}
    joints: list[Any] = []  # kept alive, for their ids

    def partition(joint: Any, recompute: Any, *others: Any) -> Any:
        joints.append(joint)
        choice = (
            recompute if isinstance(recompute, str) else tuple(sorted((str(k), str(v)) for k, v in recompute.items()))
        )
        key = id(joint), choice
        if key not in partitionings:
            partitionings[key] = make_partitioning(joint, recompute, *others)
        return partitionings[key]

    def aim_at(one: session.CompileSession, objective: Options) -> None:
        one.options = replace(one.options, **{"activation_budget": None, "max_slowdown": None, **objective})
        one._objective = Objective.of(one.options.budget_bytes, one.options.max_slowdown)
        one._builder = type(one._builder)(one.options, one.disabled, one.device)
        one._runtime = one._builder.runtime

    def each(ask: Callable[[Options], Plan]) -> None:
        for objective in objectives:
            try:
                found.append(ask(objective))
            except BudgetError as error:
                found.append(error)

    def of_graph(one: session.CompileSession, *graphs: Any) -> Any:
        planned: list[Any] = []

        def ask(objective: Options) -> Plan:
            aim_at(one, objective)
            planned.append(plan_graph(one, *graphs))
            return planned[-1].plan

        each(ask)
        return planned[-1]

    def of_step(step: Any, breaks: tuple[str, ...]) -> Plan:
        if found:  # one graph
            return plan_step(step, breaks)

        def ask(objective: Options) -> Plan:
            for graph in step.graphs:
                aim_at(graph._session, objective)
                for name in ("description", "plain"):
                    graph.__dict__.pop(name, None)
            return plan_step(step, breaks)

        each(ask)
        return next(p for p in found if isinstance(p, Plan))

    torch.compiler.reset()  # a graph break in a model's code shows in later plans of the same code
    with (
        mock.patch.object(session.CompileSession, "_plan", of_graph),
        mock.patch.object(plan_ahead, "plan_fake_step", of_step),
        mock.patch.object(planning, "make_partitioning", partition),
        no_points_between(),
    ):
        fxoffload.plan(step.model, step.kwargs, example_args=step.args, **common)
    assert len(found) == len(objectives)
    return found


def no_points_between() -> contextlib.AbstractContextManager[Any]:
    """Of a plan's frontier: each takes as long as a plan."""
    return mock.patch.object(planning, "DRAWN_POINTS", planning.FEW_POINTS)


# -- made-up measurements ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def measured(tick_ms: float) -> Iterator[None]:
    """Steps on the CPU are measured and planned with again, as on a GPU, by a clock that is ``tick_ms`` later with
    every reading."""
    now = [0.0]

    def events() -> Any:
        def read() -> float:
            now[0] += tick_ms
            return now[0]

        return host_events(read)

    def of_graph(graph: Any, planned: Any, box: Any, objective: Any, alike: Any, _: Any, pin: Any, *__: Any) -> Any:
        place = {c.name: i for i, c in enumerate(planned.partitioning.step.candidates)}
        order = [place[c.name] for c in graph.saved.candidates]
        return Replan(
            GraphRecalibration(graph, planned, box, objective, order, alike, pin),
            box,
            make_clock=lambda: StepClock(skip=1, count=2, events=events()),
            in_background=False,
        )

    def of_step(planned: Any, schedule: Any, graphs: Any, box: Any) -> Any:
        return Replan(
            ChainRecalibration(planned, schedule, graphs[0], box),
            box,
            graphs,
            make_clock=lambda: StepClock(len(graphs), skip=1, count=2, events=events()),
            in_background=False,
        )

    with (
        mock.patch.object(plan_of_graph, "replan_for", of_graph),
        mock.patch.object(plan_chain, "replan_for_chain", of_step),
    ):
        yield


class _Meter(HostMeter):
    """Answers with given times."""

    def __init__(self, op_ms: float, segment_ms: float, peak_bytes: int | None) -> None:
        super().__init__()
        self.op_ms, self.segment_ms, self.peak = op_ms, segment_ms, peak_bytes

    def ms(self, work: Work) -> float:
        work()
        return self.op_ms

    def once_ms(self, work: Work) -> float:
        work()
        return self.segment_ms

    def peak_bytes(self, work: Work) -> int | None:
        work()
        return self.peak

    def room_bytes(self) -> int:
        return 1 << 40


@contextlib.contextmanager
def measured_before(cache: str, *, op_ms: float, segment_ms: float, peak_bytes: int | None = None) -> Iterator[None]:
    """Operators and segments are measured before the first step: each takes that long. ``cache``: an empty folder."""
    environment = {
        "FXOFFLOAD_MEASURED_DEVICE_TYPES": "cpu",
        "FXOFFLOAD_CACHE_DIR": cache,
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
    }
    op_times._known.clear()
    with (
        mock.patch.dict("os.environ", environment),
        mock.patch.object(measured_costs, "meter_for", lambda device: _Meter(op_ms, segment_ms, peak_bytes)),
        mock.patch.object(measured_costs, "allowance_of_step", lambda: Allowance(1e9)),
    ):
        yield
    op_times._known.clear()


# -- memory outside compiled graphs ------------------------------------------------------------------------------------


@contextlib.contextmanager
def extra_memory(nbytes: int, *, from_the_beginning: bool) -> Iterator[None]:
    """The allocator has ``nbytes`` that are not the graphs': from the second call of a step on, or, as FSDP2 gathers
    parameters, on another stream from before the first call until the step ends."""
    calls = engine_for(CPU).calls

    def memory() -> Memory:
        step = calls._step
        assert step is not None
        return Memory(nbytes if from_the_beginning or len(step.live_bytes) else 0, nbytes)

    def blocks() -> list[Block]:
        step = calls._step
        assert step is not None
        return [] if step.has_ended else [Block(7, 20, nbytes)]

    def others(args: Sequence[Any]) -> OnOtherStreams:
        return OnOtherStreams(blocks, 0, args)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(calls, "_memory", memory))
        if from_the_beginning:
            stack.enter_context(mock.patch.object(calls, "_others", others))
        yield


def host_bytes(plan: Plan) -> int:
    """Most bytes on the host. In steps of one forward and one backward all that leaves is there in between."""
    return (plan.calibrated or plan.predicted).bytes_offloaded


# -- events of the copy streams ----------------------------------------------------------------------------------------

Log = list[str]


class _Copies(HostCopies):
    """Copies at once, and writes down what the streams of a GPU would be told. Events are names of copies."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._counts = {"offload": 0, "reload": 0}

    def offload_waits_for_compute(self) -> None:
        self._log.append("  offload stream waits for compute")

    def offload_waits_for(self, event: object, wait: Wait) -> None:
        self._log.append(f"  offload stream waits for {event}: {wait.name}")

    def reload_waits_for_compute(self) -> None:
        self._log.append("  reload stream waits for compute")

    def compute_waits_for(self, event: object, wait: Wait, stream: object = None) -> None:
        self._log.append(f"  compute waits for {event}: {wait.name}")

    def pace(self) -> None:
        self._log.append("  paced")

    def offload(self, pieces: Any, *, gives_way: bool = True) -> str:
        return self._copy("offload", pieces, gives_way)

    def reload(self, pieces: Any, *, gives_way: bool = True) -> str:
        return self._copy("reload", pieces, gives_way)

    def _copy(self, kind: str, pieces: Any, gives_way: bool) -> str:
        pieces = list(pieces)
        HostCopies.offload(self, pieces)
        self._counts[kind] += 1
        name = f"{kind} {self._counts[kind]}"
        self._log.append(f"  {name}: {sum(t.nbytes for t, _ in pieces)} B{', gives way' if gives_way else ''}")
        return name


class _Arena(HostArena):
    """Writes down where blocks lie, and when they are let go of."""

    def __init__(self, log: Log) -> None:
        super().__init__(HeapMemory(), 1 << 28)
        self._log = log

    def allocate_all_ready(self, sizes: Sequence[int]) -> list[HostBlock | None]:
        pairs = zip(super().allocate_all_ready(sizes), sizes, strict=True)
        return [self._noted(block, nbytes) for block, nbytes in pairs]

    def allocate(self, nbytes: int, limit_bytes: int) -> HostBlock | None:
        found = self._noted(super().allocate(nbytes, limit_bytes), nbytes)
        if found is None:
            self._log.append(f"  no room on the host for {nbytes} B")
        return found

    def _noted(self, block: HostBlock | None, nbytes: int) -> HostBlock | None:
        if block is not None:
            self._log.append(f"  host block for {nbytes} B at {block.offset}")
            weakref.finalize(block, self._log.append, f"  host block at {block.offset} is free").atexit = False
        return block


class _Engine(CopyEngine):
    """Writes down what graphs ask for."""

    def __init__(self, log: Log) -> None:
        super().__init__(CPU, _Copies(log), _Arena(log))
        self._log = log
        self._names: weakref.WeakKeyDictionary[Transfer, str] = weakref.WeakKeyDictionary()
        self._saved = 0
        self.on_drop = lambda source: log.append(f"  source of {source.nbytes} B is dropped")

    def offload(
        self, storages: Any, budgets: Budgets, *, reclaimable: bool, watches: Sequence[Watch | None] = ()
    ) -> list[Transfer | None]:
        watched = sum(w is not None for w in watches)
        told = [
            f"{len(storages)} storages",
            *["may be taken back"] * reclaimable,
            *[f"{watched} watched"] * bool(watched),
        ]
        self._log.append(f"offload: {', '.join(told)}")
        found = super().offload(storages, budgets, reclaimable=reclaimable, watches=watches)
        for transfer in found:
            if transfer is not None:
                self._names[transfer] = f"v{self._saved}"
                self._saved += 1
        return found

    def release(self, limit_bytes: int) -> None:
        self._log.append(f"release: at most {limit_bytes} B in flight")
        super().release(limit_bytes)

    def wait_offload(self, transfers: Sequence[Transfer]) -> None:
        self._log.append(f"wait for offload: {self._of(transfers)}")
        super().wait_offload(transfers)

    def request(self, group: Group, *, keeps_graph: bool, prefetch: bool, across_graphs: bool) -> None:
        self._log.append(f"backward begins: {self._of(group.in_need_order())}{', graph kept' if keeps_graph else ''}")
        super().request(group, keeps_graph=keeps_graph, prefetch=prefetch, across_graphs=across_graphs)

    def prefetch(self, budget_bytes: int, *, reclaimed_share: int = 0, at_least_one: bool = True) -> None:
        told = f"{budget_bytes} B ahead, taken back count {reclaimed_share}{', or one' if at_least_one else ''}"
        self._log.append(f"prefetch: at most {told}")
        super().prefetch(budget_bytes, reclaimed_share=reclaimed_share, at_least_one=at_least_one)

    def take(self, transfers: Sequence[Transfer]) -> Any:
        self._log.append(f"take: {self._of(transfers)}")
        return super().take(transfers)

    def _of(self, transfers: Sequence[Transfer]) -> str:
        return " ".join(self._names[t] for t in transfers) or "nothing"


@contextlib.contextmanager
def recording() -> Iterator[Log]:
    """The log of everything that is compiled and run meanwhile, on the CPU."""
    log: Log = []
    torch.compiler.reset()
    build = outer_program._segment_step

    def step_of(node: Any, steps: Any) -> Any:
        run, name = build(node, steps), str(node.target)

        def noted(slots: Any, call: Any) -> None:
            log.append(f"segment {name}")
            run(slots, call)

        return noted

    with (
        mock.patch.dict(engine_module._ENGINES, {CPU: _Engine(log)}),
        mock.patch.object(outer_program, "_segment_step", step_of),
    ):
        yield log
        torch.compiler.reset()


def follow_in_graph(graph: Any, offload: Callable[[int], bool], in_flight: int, ahead: int) -> None:
    """From now on calls of a graph move the candidates whose places ``offload`` says, under windows that alternate
    between this many bytes and none."""
    down, up = (len(g.graph.find_nodes(op="call_module")) + 1 for g in (graph.forward, graph.backward))
    flags = tuple(offload(i) for i in range(len(graph.saved.candidates)))
    graph.planned = Choice(flags, Windows(_alternating(in_flight, down), _alternating(ahead, up)))


def _alternating(nbytes: int, count: int) -> tuple[int, ...]:
    return tuple(nbytes * (i % 3 != 2) for i in range(count))


@contextlib.contextmanager
def plans_for_steps(offload: Callable[[int], bool], in_flight: int, ahead: int) -> Iterator[None]:
    """Steps of several graphs are planned like that, whatever their options ask for."""

    def decide(planned: Any) -> Schedule:
        chain: Chain = planned.chain
        step = chain.step
        moves = tuple(bool(c.moved_bytes) and offload(i) for i, c in enumerate(step.candidates))
        sizes = len(step.forward) + 1, len(step.backward) + 1
        windows = Windows(_alternating(in_flight, sizes[0]), _alternating(ahead, sizes[1]))
        return Schedule(moves, windows, simulate(step, moves, copies=planned.rates, windows=windows))

    with mock.patch.object(chain_planning.ChainPlanning, "run", decide):
        yield

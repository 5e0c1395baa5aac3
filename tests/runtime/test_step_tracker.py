"""The states of steps, by scripts of calls: no graph is compiled, and no model runs.

A script names graphs by letters: "A" is a forward of graph a, "a" the backward of its youngest call that waits. "A!"
and "a!" raise. "~": the caller lets go of everything that waits. "A9": a forward of size 9. "hA": under saved-tensor
hooks. "kA": under override_policy("keep_all"). "nA": at a moment when the graph follows no plan.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from fxoffload.runtime.profiler.allocator_trace import Memory
from fxoffload.runtime.tracker import running_step, step_state, step_tracker
from fxoffload.runtime.tracker.chains import ChainPlan, Sizes
from fxoffload.runtime.tracker.hold_to_budget import HoldToBudget
from fxoffload.runtime.tracker.own_plan import OwnPlan
from fxoffload.runtime.tracker.step_state import BEGINNINGS, NEXT, Departure, StepEvent, StepState, after
from fxoffload.runtime.tracker.step_tracker import StepTracker
from fxoffload.runtime.transfer import Group
from fxoffload.step.choice import Choice
from fxoffload.step.edges import Edges
from fxoffload.torch_private.storages import StorageRef

AT_FIRST, PLANNED = Choice((True,)), Choice((False, True))


class InSteps:
    """Of a graph whose calls have one size that varies; plans serve multiples of 8."""

    def told_by(self, args: Sequence[Any]) -> Sizes:
        return (args[0],)

    def rounded_up(self, sizes: Sizes) -> Sizes:
        return tuple(-(-size // 8) * 8 for size in sizes)


class Script:
    """Plays scripts.

    Attributes:
        plans: how many calls the chain of each plan has.
        chosen: what each forward followed: "plan", "first" or "".
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, *, sizes: bool = False, budget: bool = True, events: Any = None
    ) -> None:
        self.flags = SimpleNamespace(hooks=False, keeps=False, follows=True)
        patch.setattr(step_tracker, "saved_tensor_hooks_active", lambda: self.flags.hooks)
        self.tracker = StepTracker(dict, in_background=False, memory=lambda: Memory(0, 0), events=events)
        self.plans: list[int] = []
        self.chosen: list[str] = []
        self.plan: Callable[..., ChainPlan | None] = self._plan
        self.waiting: list[tuple[str, Group, torch.Tensor]] = []
        self.graphs = {name: self.tracker.track() for name in "abc"}
        for graph in self.graphs.values():
            graph.description, graph.has_budget, graph.at_first = object(), budget, AT_FIRST
            graph.planner = lambda *args, **more: self.plan(*args, **more)
            graph.edges = Edges((), (), (), (), saved=(0,))
            graph.may_follow, graph.may_keep = lambda: self.flags.follows, lambda: self.flags.keeps
            graph.sizes = InSteps() if sizes else None

    def _plan(self, tracked: Sequence[Any], seen: Any, sizes: Sequence[Sizes], meanwhile: Any = None) -> ChainPlan:
        self.plans.append(len(tracked))
        refs = tuple(map(weakref.ref, tracked))
        return ChainPlan(refs, (PLANNED,) * len(tracked), sizes=tuple(sizes), order=seen.order)

    def play(self, script: str) -> str:
        """Returns the state after each call, each state once in a row, and why the step departed."""
        states: list[str] = []
        for word in script.split():
            self._play(word)
            if not states or states[-1] != self.tracker.state.value:
                states.append(self.tracker.state.value)
        step = self.tracker._step
        why = [] if step is None or step.departure is None else [f"({step.departure.value})"]
        return " ".join([*states, *why])

    def _play(self, word: str) -> None:
        match = re.fullmatch(r"(~)|([hkn]?)([ABC])(\d*)(!?)|([abc])(\d*)(!?)", word)
        assert match, word
        lets_go, how, forward, size, raises, backward, which, backward_raises = match.groups()
        if lets_go:
            self.waiting.clear()
        elif forward:
            flags = self.flags
            flags.hooks, flags.keeps, flags.follows = how == "h", how == "k", how != "n"
            graph = self.graphs[forward.lower()]
            graph.forward_begins([int(size or 8)])
            self.chosen.append({AT_FIRST: "first", PLANNED: "plan"}.get(graph.followed, "") if graph.followed else "")
            if not raises:
                group, saved = Group(), torch.ones(1)
                group.add(0, SimpleNamespace(nbytes=4))  # pyright: ignore[reportArgumentType]
                graph.forward_ends(group, [saved])
                self.waiting.append((forward.lower(), group, saved))
        else:
            at = [i for i, (name, _, _) in enumerate(self.waiting) if name == backward][int(which or -1)]
            _, group, _ = self.waiting.pop(at)
            self.graphs[backward].backward_begins(group, [])
            if not backward_raises:
                self.graphs[backward].backward_ends([])


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    return Script(monkeypatch)


@pytest.fixture
def planned(script: Script) -> Script:
    """Of a chain that has a plan."""
    script.play("A B b a")
    script.play("A B b a")
    assert script.play("A B b a") == "following complete"
    return script


def test_two_steps_are_observed_and_the_third_follows_their_plan(script: Script) -> None:
    assert script.tracker.state is StepState.IDLE
    assert script.play("A B b a") == "observing complete"
    assert script.play("A B b a") == "observing complete"
    assert script.plans == []
    assert script.play("A B b a") == "following complete"
    assert script.plans == [2]
    assert script.chosen == ["first"] * 4 + ["plan"] * 2


def test_nothing_is_chosen_at_first_without_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(monkeypatch, budget=False)
    script.play("A B b a")
    script.play("A B b a")
    assert script.play("A B b a") == "following complete"
    # The second one takes the least, since the memory outside the graphs is read in it.
    assert script.chosen == ["", "", "first", "first", "plan", "plan"]


@pytest.mark.parametrize(
    ("step", "states"),
    [
        ("A! B b", "observing irregular (unusual)"),
        ("A hB b a", "observing irregular (unusual)"),
        ("A B b!", "observing"),
        ("A nB b a", "observing irregular (unusual)"),
        ("A B hA b a a", "observing irregular (unusual)"),
    ],
)
def test_a_step_that_is_no_chain_is_not_planned(script: Script, step: str, states: str) -> None:
    for _ in range(2):
        assert script.play(step) == states
        script.waiting.clear()
    script.play("A B b a")
    assert script.plans == []


@pytest.mark.parametrize(
    ("step", "states"),
    [
        ("A C c a", "following irregular (missed)"),
        ("A B C c b a", "following irregular (missed)"),
        ("A a", "following irregular (missed)"),
        ("A B a b", "following irregular (missed)"),
        ("A! A a", "following irregular (missed)"),
        ("A hB b a", "following irregular (unusual)"),
        ("A nB b a", "following irregular (unusual)"),
        ("A kB b a", "following complete"),
    ],
)
def test_a_step_departs_from_its_plan(planned: Script, step: str, states: str) -> None:
    assert planned.play(step) == states
    planned.waiting.clear()
    assert planned.play("A B b a") == "following complete"


# -- pipelines ---------------------------------------------------------------------------------------------------------

# Four microbatches through two graphs: F F 0 F 1 F 2 3.
PIPELINE = "A B A B b0 a0 A B b0 a0 A B b0 a0 b a"


@pytest.mark.parametrize(
    "step",
    [PIPELINE, "A A A a0 A a0 A a0 a0 a", "A B a b", "A B A B b0 a0 b a", "A B A b a a", "A A a A a0 a"],
)
def test_a_pipeline_that_comes_twice_has_a_plan(script: Script, step: str) -> None:
    calls = sum(word.isupper() or word[0].isupper() for word in step.split())
    for state in ("observing", "observing", "following", "following"):
        assert script.play(step) == f"{state} complete"
        tracker_step = script.tracker._step
        assert tracker_step is not None and len(tracker_step.calls) == calls
    assert script.plans == [calls]
    assert script.chosen == ["first"] * 2 * calls + ["plan"] * 2 * calls


@pytest.fixture
def pipeline(script: Script) -> Script:
    """A pipeline that has a plan."""
    for _ in range(3):
        script.play(PIPELINE)
    assert script.tracker.state is StepState.COMPLETE
    return script


def test_the_turn_of_a_pipeline_comes_once(pipeline: Script) -> None:
    """The peak of its loss is that before the first backward, whatever forwards come after it."""
    with (
        mock.patch.object(HoldToBudget, "forward_ended") as forward,
        mock.patch.object(HoldToBudget, "first_backward_begins") as backward,
    ):
        pipeline.play(PIPELINE)
    assert (forward.call_count, backward.call_count) == (4, 1)


@pytest.mark.parametrize(
    ("step", "states"),
    [
        ("A B A B b a", "following irregular (missed)"),  # the youngest first
        ("A B A B A B b a b a b a", "following irregular (missed)"),
        ("A B b a", "following irregular (missed)"),
        ("A B A B b0 a0 A C c a0 b a", "following irregular (missed)"),
        ("A B A B b0 a0 A hB b0 a0", "following irregular (unusual)"),
        ("A B A B b0 a0 b a", "following irregular (missed)"),
        ("A B A B b0 a0 A! A B b0 a0 A B b0 a0 b a", "following irregular (missed)"),
    ],
)
def test_a_step_departs_from_the_plan_of_a_pipeline(pipeline: Script, step: str, states: str) -> None:
    assert pipeline.play(step).startswith(states)
    pipeline.waiting.clear()
    assert pipeline.play(PIPELINE) == "following complete"
    assert pipeline.plans == [8]


def test_a_pipeline_waits_whole_for_a_plan_that_has_to_be_made_ready(script: Script) -> None:
    """The plan is not followed from the middle of a step."""
    plan, made_ready = script.plan, []

    def unready(*args: Any, **more: Any) -> ChainPlan | None:
        made = plan(*args, **more)
        assert made is not None
        made.prepare = lambda: made_ready.append(len(script.tracker._step.calls) if script.tracker._step else 0)
        return made

    script.plan = unready
    script.play(PIPELINE)
    script.play(PIPELINE)
    script.tracker.plans._make_ready = lambda tracked, chain: False  # type: ignore[method-assign]
    assert script.play(PIPELINE) == "waiting complete"
    assert script.play("A B A B b0 a0") == "waiting"
    del script.tracker.plans._make_ready
    assert script.play("A B b0 a0 A B b0 a0 b a") == "waiting complete"
    assert made_ready == []
    assert script.play(PIPELINE) == "following complete"
    assert made_ready == [0]  # the step before is over by then


def test_two_orders_of_the_same_graphs_are_not_one_chain(script: Script) -> None:
    for step in ("A B A B b0 a0 b a", "A B A B b a b a"):
        assert script.play(step) == "observing complete"
    script.play("A")
    assert script.plans == []


def test_another_order_is_observed_after_two_steps(pipeline: Script) -> None:
    for _ in range(2):
        assert pipeline.play("A B A B b a b a") == "following irregular (missed)"
    for state in ("observing", "observing", "following"):
        assert pipeline.play("A B A B b a b a") == f"{state} complete"
    assert pipeline.plans == [8, 4]


def test_a_pipeline_is_told_what_is_reloaded_next(pipeline: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """The values of its own run of backwards; none that a forward comes before."""
    told: list[int | None] = []
    begins = pipeline.tracker.backward_begins

    def backward_begins(*args: Any) -> Group:
        group = begins(*args)
        told.append(None if group.following is None else len([ref() for ref in group.following]))
        return group

    monkeypatch.setattr(pipeline.tracker, "backward_begins", backward_begins)
    pipeline.play(PIPELINE)
    assert told == [1, 0, 1, 0, 3, 2, 1, 0]


def test_an_evaluation_that_is_kept_is_no_pipeline(script: Script) -> None:
    """It waits from step to step: sooner or later, steps are observed without it."""
    script.play("A B b a A B")  # the caller keeps that result
    kept = script.waiting[:]
    script.waiting.clear()
    states = [script.play("A B b a") for _ in range(8)]
    assert states[-1] == "following complete"
    assert script.plans == [2]
    assert kept


def test_evaluations_whose_results_are_kept_until_the_next(script: Script) -> None:
    kept: list[Any] = []
    for _ in range(20):
        script.play("A B b a A B")
        kept[:] = script.waiting
        script.waiting.clear()
        step = script.tracker._step
        assert step is not None and len(step.calls) <= 6


def test_a_forward_that_the_order_does_not_have_next_departs(pipeline: Script) -> None:
    """Though it is one of the graph that is forwarded next. The rest of the step's calls are no step of their own."""
    assert pipeline.play("A B A B A") == "following irregular (missed)"
    pipeline.play("B b0 a0 A")
    step = pipeline.tracker._step
    assert step is not None and len(step.calls) == 7


def test_an_evaluation_that_was_dropped_ends_a_step(script: Script) -> None:
    """In a pipeline every forward that has begun goes backward."""
    script.play("A B C c")
    del script.waiting[0]  # of the first
    script.play("A")
    step = script.tracker._step
    assert step is not None and len(step.calls) == 1


def test_of_two_calls_that_saved_nothing_to_tell_them_by_the_one_that_goes_backward_is_unknown(script: Script) -> None:
    script.play("A A B")
    step = script.tracker._step
    assert step is not None
    graph, empty = script.graphs["a"], Group()
    others = step.pending[:2]
    for call in others:
        call.group = weakref.ref(empty)
    assert step.call_of(graph, empty) == (others[1], Departure.UNUSUAL)
    values = [torch.ones(1), torch.ones(1)]
    for call, value in zip(others, values, strict=True):
        call.kept = StorageRef(value)
    assert step.call_of(graph, empty, [values[0], 3]) == (others[0], None)
    assert step.call_of(graph, empty, [torch.ones(1)]) == (others[1], Departure.UNUSUAL)
    others[0].group = weakref.ref(script.waiting[0][1])
    assert step.call_of(graph, empty) == (others[1], None)


def test_a_loop_whose_forwards_run_ahead_of_its_backwards_ends_its_steps(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_step, "_MOST_TURNS", 3)
    script.play("A")
    lengths = []
    for _ in range(8):
        script.play("A a0")
        step = script.tracker._step
        assert step is not None
        lengths.append(len(step.calls))
    assert max(lengths) == 5


def test_plans_that_are_lost_for_good_are_told_of(planned: Script) -> None:
    told: list[int] = []
    for graph in planned.graphs.values():
        graph.gives_up = lambda: told.append(1)
    for step in ("A C c a", "A B b a") * 2:
        for _ in range(5):
            planned.play(step)
    assert planned.plans == [2, 2, 2]
    assert told == [1]


def test_a_plan_does_not_join_an_evaluation_to_the_step_before(planned: Script) -> None:
    for _ in range(3):
        assert planned.play("A B b a") == "following complete"
        assert planned.play("A B ~") == "following"


def test_from_where_it_departs_a_step_runs_without_a_plan(planned: Script) -> None:
    planned.chosen.clear()
    planned.play("A C B b c a")
    assert planned.chosen == ["plan", "", ""]


def test_a_chain_that_was_missed_twice_is_observed_anew(planned: Script) -> None:
    for _ in range(2):
        assert planned.play("A C c a") == "following irregular (missed)"
    assert planned.play("A C c a") == "observing complete"
    assert planned.play("A C c a") == "observing complete"
    assert planned.play("A C c a") == "following complete"
    assert planned.plans == [2, 2]


def test_one_miss_is_forgiven(planned: Script) -> None:
    for _ in range(3):
        assert planned.play("A C c a") == "following irregular (missed)"
        assert planned.play("A B b a") == "following complete"


def test_a_forward_without_a_backward_is_left_behind(planned: Script) -> None:
    assert planned.play("A B ~") == "following"
    assert planned.play("A B b a") == "following complete"


def test_a_forward_that_waits_is_part_of_the_next_step(planned: Script) -> None:
    assert planned.play("A B A b a a") == "following irregular (missed)"


def test_a_planner_that_finds_nothing_is_asked_a_few_times(script: Script) -> None:
    asked: list[int] = []
    script.plan = lambda tracked, *args, **more: asked.append(len(tracked))
    states = [script.play("A B b a") for _ in range(12)]
    assert states[-3:] == ["unplanned complete"] * 3
    assert asked == [2, 2, 2]


def test_an_order_that_changes_is_observed_only_so_often(script: Script) -> None:
    told: list[int] = []
    script.graphs["a"].gives_up = lambda: told.append(1)
    states = [script.play("A B b a" if i % 2 else "A C c a") for i in range(18)]
    assert states[:16] == ["observing complete"] * 16
    assert states[16:] == ["unplanned complete"] * 2
    assert script.plans == [] and told == [1]


def test_a_graph_without_a_planner_has_no_plan(script: Script) -> None:
    for graph in script.graphs.values():
        graph.planner = None
    assert [script.play("A B b a") for _ in range(3)] == ["unplanned complete"] * 3


def test_each_size_is_measured_once_and_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(monkeypatch, sizes=True)
    script.play("A8 B8 b a")
    script.play("A8 B8 b a")
    assert script.play("A8 B8 b a") == "following complete"
    assert script.play("A20 B20 b a") == "measuring complete"
    assert script.play("A17 B17 b a") == "following complete"
    assert script.play("A6 B6 b a") == "following complete"
    assert script.plans == [2, 2]


def test_a_step_that_is_measured_may_be_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(monkeypatch, sizes=True)
    script.play("A8 B8 b a")
    script.play("A8 B8 b a")
    assert script.play("A20 C20 c a") == "measuring irregular (missed)"
    assert script.play("A20 B20 b a") == "measuring complete"


def test_a_call_that_is_larger_than_its_plan_has_the_plan_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(monkeypatch, sizes=True)
    script.play("A8 B16 b a")
    script.play("A8 B16 b a")
    assert script.play("A8 B16 b a") == "following complete"
    script.chosen.clear()
    assert script.play("A8 B40 b a") == "following irregular (outgrew)"
    assert script.chosen == ["plan", "first"]
    assert script.play("A8 B40 b a") == "measuring complete"
    assert script.play("A8 B33 b a") == "following complete"


def test_while_a_plan_has_to_be_made_ready_steps_wait(script: Script) -> None:
    """As where a forward under way keeps it from being compiled."""
    plan, ready = script.plan, False

    def unready(*args: Any, **more: Any) -> ChainPlan | None:
        made = plan(*args, **more)
        assert made is not None
        made.prepare = lambda: None
        return made

    script.plan = unready
    script.tracker.plans._make_ready = lambda tracked, chain: ready  # type: ignore[method-assign]
    script.play("A B b a")
    script.play("A B b a")
    assert [script.play("A B b a") for _ in range(2)] == ["waiting complete"] * 2
    del script.tracker.plans._make_ready
    assert script.play("A B b a") == "following complete"


def test_under_keep_all_a_step_moves_nothing_and_says_nothing_of_the_plan(planned: Script) -> None:
    for _ in range(3):
        assert planned.play("kA kB b a") == "following complete"
        assert planned.play("kA kC c a") == "following irregular (missed)"
    assert planned.play("A B b a") == "following complete"
    assert planned.plans == [2]


def test_end_step_says_whether_the_next_goes_on_like_it(script: Script) -> None:
    assert script.tracker.end_step()  # there is none
    script.play("A B")
    assert not script.tracker.end_step()
    script.play("b a")
    assert not script.tracker.end_step()  # a plan may come of it
    script.play("A B b a")
    assert not script.tracker.end_step()
    script.play("A B b a")
    assert script.tracker.end_step()
    assert script.tracker.state is StepState.IDLE


def test_a_second_backward_makes_a_complete_step_irregular(planned: Script) -> None:
    planned.play("A B b")
    _, group, _ = planned.waiting[0]
    assert planned.play("a") == "complete"
    planned.graphs["a"].backward_begins(group, [])
    assert planned.tracker.state is StepState.IRREGULAR


# -- the table ---------------------------------------------------------------------------------------------------------


def test_the_table_has_every_state() -> None:
    assert step_state.__doc__ is not None
    rows = re.findall(r"^    (\w+)  +\S", step_state.__doc__, re.MULTILINE)
    assert rows[1:] == [state.value for state in StepState if state.value in rows[1:]]
    assert set(rows[1:]) == {state.value for state in StepState}


def test_transitions() -> None:
    for state in BEGINNINGS:
        assert after(state, StepEvent.DEPARTS) is StepState.IRREGULAR
        assert after(state, StepEvent.COMPLETES) is StepState.COMPLETE
    assert {state for state, _ in NEXT} == {*BEGINNINGS, StepState.COMPLETE}
    assert after(StepState.IRREGULAR, StepEvent.COMPLETES) is StepState.IRREGULAR
    with pytest.raises(ValueError, match="expected a step that runs"):
        after(StepState.IDLE, StepEvent.DEPARTS)


# -- recordings of single calls ----------------------------------------------------------------------------------------


def _forward(script: Script, name: str, *, moves: bool) -> tuple[Group, Any]:
    """A call that is measured as a step of its own. Returns its group and its recording."""
    group, recording = Group(), SimpleNamespace()
    group.recording = recording  # pyright: ignore[reportAttributeAccessIssue]
    script.graphs[name].forward_begins([8])
    if moves:
        group.add(0, SimpleNamespace(nbytes=4))  # pyright: ignore[reportArgumentType]
    script.graphs[name].forward_ends(group, [torch.ones(1)])
    return group, recording


def _backward(script: Script, name: str, group: Group | None = None) -> Any:
    """The recording that its backward finds; as the executor, it takes it."""
    found = script.graphs[name].backward_begins(group or Group(), [])
    recording, found.recording = found.recording, None
    script.graphs[name].backward_ends([])
    return recording


@pytest.fixture
def single(script: Script) -> Script:
    """No graph is part of a plan over several."""
    for graph in script.graphs.values():
        graph.planner = None
    return script


def test_a_backward_without_tokens_finds_the_recording_of_its_call(single: Script) -> None:
    _forward(single, "a", moves=False)  # an evaluation
    _, first = _forward(single, "a", moves=False)
    _, inner = _forward(single, "b", moves=False)
    assert _backward(single, "b") is inner
    assert _backward(single, "a") is first
    assert _backward(single, "a") is None, "retain_graph: once is enough"


def test_tokens_tell_whose_recording_it_is(single: Script) -> None:
    calls = [_forward(single, "a", moves=True) for _ in range(2)]
    for group, recording in calls:
        assert _backward(single, "a", group) is recording
        assert _backward(single, "a", group) is None, "retain_graph: once is enough"


def test_the_backward_of_an_unusual_call_takes_no_others_recording(single: Script) -> None:
    """A call under hooks, or in a checkpoint's recompute, has none."""
    _forward(single, "a", moves=False)
    _, other = _forward(single, "b", moves=False)
    single.play("hA")
    single.waiting.clear()
    assert _backward(single, "a") is None
    assert _backward(single, "b") is other


@pytest.mark.parametrize("in_group", [False, True])
def test_the_first_step_is_observed_in_which_graphs_join(
    script: Script, in_group: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in a process group: DDP makes its buckets anew in the second step."""
    monkeypatch.setattr(step_tracker, "in_process_group", lambda: in_group)
    for name in "ab":
        tracked = script.graphs[name]
        tracked.own_plan = OwnPlan(60, 100, partial(setattr, tracked, "description", tracked.description))
    script.graphs["b"].description = None  # it returns the loss
    assert script.play("A B b a").startswith("observing irregular" if in_group else "observing complete")
    for _ in range(1 + in_group):
        assert script.play("A B b a") == "observing complete"
    assert script.play("A B b a") == "following complete"


def test_a_later_step_in_which_graphs_join_is_not_observed(script: Script) -> None:
    """Its plan is made of the next two."""
    for name in "ab":
        script.graphs[name].own_plan = OwnPlan(60, 100, lambda: None)
    script.graphs["a"].control = SimpleNamespace(loop=None)  # type: ignore[assignment]  # it meets its budget alone
    for state in ("observing complete", "observing complete", "unplanned complete"):
        assert script.play("A a") == state
    assert script.graphs["a"].is_held_alone
    script.graphs["a"].own_plan.join = lambda: setattr(script.graphs["a"], "control", None)  # type: ignore[union-attr]
    assert script.play("A B b a").startswith("unplanned")
    assert script.play("A B b a") == script.play("A B b a") == "observing complete"
    assert script.plans == []
    assert script.play("A B b a") == "following complete"


@pytest.mark.parametrize("is_held", [False, True])
def test_a_graph_that_is_held_to_its_budget_alone_needs_no_plan_for_its_step(script: Script, is_held: bool) -> None:
    tracked, told = script.graphs["a"], mock.Mock()
    tracked.own_plan, tracked.gives_up = OwnPlan(1, 100, lambda: None), told
    tracked.control = SimpleNamespace(loop=None) if is_held else None  # type: ignore[assignment]
    for step in ("A a", "A A a a") * 10:
        script.play(step)
    assert told.called is not is_held

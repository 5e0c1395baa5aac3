"""The claims and the pictures, from rows made by hand."""

from pathlib import Path

import pytest

from benchmarks.claims import GIB, check_claims
from benchmarks.claims_curve import Point, below, interpolate, monotone
from benchmarks.derived import derive
from benchmarks.quartiles import summarize
from benchmarks.schema import (
    Case,
    LimitedRun,
    LongRun,
    Memory,
    PlanFacts,
    Protocol,
    Record,
    Report,
    Result,
    Variant,
    from_json,
    to_json,
)
from benchmarks.tables import render

STACK, LONG = Case(), Case(layers=10, seq=65_536)
BUDGETS = (9.1, 10, 11, 13, 16, 20, 25, 30)
TIMES = (745, 742, 741, 738, 734, 730, 727, 722)


def row(label: str, peak_gib: float, step_ms: float, case: Case = STACK, **more: object) -> Record:
    kind, _, budget = label.partition("@")
    memory = Memory(0, int(peak_gib * GIB), 0, 0, 0)
    result = Result(memory=memory, first_step_memory=memory, step_ms=summarize([step_ms]))
    options = {}
    if kind == "auto":
        said = {"peak_bytes": int(1.01 * peak_gib * GIB), "step_ms": 0.97 * step_ms}
        result.plan = PlanFacts(1, 1, "a plan", said, said, 0, calibrated=said, calibrated_baseline=said)
        if budget:
            result.budget_bytes = int(float(budget) * GIB)
            options = {"activation_budget": f"{budget}GiB"}
            result.long_run = LongRun(20, memory, summarize([step_ms]), 1.05)
            result.limited_run = LimitedRun("steps", 0.1, 1, completed=True, num_alloc_retries=0)
    for name, value in more.items():
        setattr(result, name, value)
    return Record("plan", case, Variant(label, kind, options), "ok", "", 1.0, result)


def good_rows() -> list[Record]:
    plans = [row(f"auto@{b}", b - 0.05, t) for b, t in zip(BUDGETS, TIMES, strict=True)]
    torch = [row("torch_budget@0.1", 9.2, 930), row("torch_budget@0.5", 17, 760)]
    policies = [row("checkpoint", 8.95, 920), row("offload_all", 9.14, 1250), row("keep_all", 34.0, 721)]
    return [row("inductor", 34.2, 720), *policies, row("auto", 12.5, 737), *plans, *torch]


def claims_of(records: list[Record]) -> dict[str, tuple[bool | None, dict]]:
    report = Report("plan", {}, Protocol(), None, records)
    return {claim["claim"]: (claim["held"], claim["figures"]) for claim in check_claims(report)}


def find(records: list[Record], word: str) -> tuple[bool | None, dict]:
    (found,) = [value for name, value in claims_of(records).items() if word in name]
    return found


def test_all_claims_hold_where_all_is_well() -> None:
    claims = claims_of(good_rows())
    assert {name: held for name, (held, _) in claims.items() if not held} == {}
    figures = find(good_rows(), "checkpointing's peak")[1]
    assert figures["variant"] == "auto@9.1" and figures["slowdown"] == pytest.approx(745 / 720 - 1)
    assert figures["stretch_held"] is False


@pytest.mark.parametrize(
    ("word", "broken"),
    [
        ("checkpointing's peak", row("auto@9.1", 9.05, 760)),
        ("by default", row("auto", 13.1, 737)),
        ("by default", row("auto", 12.5, 740)),
        ("within its budget", row("auto@11", 11.2, 741)),
        ("first step", row("auto@11", 10.9, 741, first_step_memory=Memory(0, 12 * GIB, 0, 0, 0))),
        ("reserved", row("auto@11", 10.9, 741, long_run=LongRun(20, None, summarize([1.0]), 1.2))),
        ("memory_fraction", row("auto@11", 10.9, 741, limited_run=LimitedRun("steps", 0.1, 1, reason="out of memory"))),
        ("never slower", row("auto@25", 24.9, 745)),
        ("torch's", row("torch_budget@0.1", 9.2, 735)),
        ("offload_all", row("offload_all", 9.14, 730)),
        ("calibrated", row("auto@11", 10.9, 741, plan=PlanFacts(1, 1, "", {"peak_bytes": 1, "step_ms": 1}, {}, 0))),
    ],
)
def test_each_claim_sees_what_breaks_it(word: str, broken: Record) -> None:
    if word == "calibrated":
        assert broken.result.plan is not None
        broken.result.plan.calibrated = broken.result.plan.predicted
        broken.result.plan.calibrated_baseline = {"step_ms": 1}
    records = [broken if r.variant.label == broken.variant.label else r for r in good_rows()]
    assert find(records, word)[0] is False


def test_the_long_sequence() -> None:
    word = "25%"
    records = [row("inductor", 80, 4000, LONG), row("auto", 30, 4010, LONG), row("auto@20", 19.5, 4050, LONG)]
    held, figures = find(records, word)
    assert held is True and figures["variant"] == "auto@20"
    assert find(records[:2], word)[0] is False
    records[2] = row("auto@20", 19.5, 4080, LONG)
    assert find(records, word)[0] is False


def test_what_was_not_measured_is_neither_held_nor_broken() -> None:
    claims = claims_of([row("inductor", 34.2, 720)])
    assert all(held is None for held, _ in claims.values())
    assert all("missing" in figures for _, figures in claims.values())
    held, figures = find([r for r in good_rows() if r.variant.label != "auto@16"], "within its budget")
    assert held is None and figures["missing"] == "only 7 budgets"


def point(peak: int, ms: float, label: str = "") -> Point:
    return Point(label or f"{peak}", "", peak, ms)


def test_lines_between_points() -> None:
    peers = [point(10, 200), point(20, 100)]
    assert interpolate(peers, 15) == 150
    assert interpolate(peers, 25) is None and interpolate(peers, 9) is None


def test_below_looks_from_both_sides() -> None:
    peers = [point(10, 200), point(20, 100)]
    assert below([point(10, 150), point(20, 100)], peers, all_peers=True)[0]
    assert not below([point(12, 201.5)], peers, all_peers=False)[0], "a peer is smaller and faster"
    # No peer dominates the point, but it reaches neither the second peer's time nor the first's peak.
    assert not below([point(15, 150)], peers, all_peers=False)[0]
    assert below([point(15, 90)], peers, all_peers=False)[0]
    assert not below([point(15, 90)], peers, all_peers=True)[0], "nothing as small as the first peer"


def test_noise_is_no_rise() -> None:
    assert monotone([point(1, 100), point(2, 100.4)])[0]
    held, figures = monotone([point(1, 100), point(2, 90), point(3, 95, "c")])
    assert not held and figures["rises"]["c"]["slower_than"] == "2"


def test_a_plan_is_compared_with_what_was_measured() -> None:
    rows = derive([row("inductor", 34.2, 720), row("auto@11", 10.9, 741)], None)
    assert rows[1]["predicted_peak_error"] == pytest.approx(0.01, rel=1e-3)
    assert rows[1]["calibrated_step_error"] == pytest.approx(-0.03)
    assert rows[1]["peak_within_budget"] is True and rows[1]["first_step_within_budget"] is True
    assert rows[1]["step_vs_inductor"] == pytest.approx(741 / 720)


def test_the_table_and_the_picture(tmp_path: Path) -> None:
    records = good_rows()
    report = Report("plan", {"gpu_name": "none"}, Protocol(), None, records, derive(records, None))
    report.claims = check_claims(report)
    again = from_json(Report, to_json(report))
    assert again == report
    table = render(again)
    assert "auto@9.1" in table and "- held: more memory is never slower" in table
    pytest.importorskip("matplotlib")
    from benchmarks.plot import draw

    draw(report, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match="found none"):
        draw(Report("plan", {}, Protocol(), None, []), tmp_path / "none.png")

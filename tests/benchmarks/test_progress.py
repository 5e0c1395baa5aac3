"""What a run shows of itself, on a terminal and elsewhere."""

import io
import time

from rich.console import Console

from benchmarks.progress import RunProgress, describe
from benchmarks.schema import Case, Memory, Record, Result, Summary, Variant

STEP = Summary(727.5, 1.0, 1.0, 1.0, 1.0, [])


def show(*, terminal: bool) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=120)
    with RunProgress(2, console) as progress:
        progress.begin("stack 16x16384 auto@[bold]", 300.0)
        time.sleep(0.6)
        progress.end("stack 16x16384 auto@[bold]: ok in 1 s")
        progress.begin("next", -1.0)
        progress.end("next: skipped in 0 s: no time")
    return stream.getvalue()


def test_elsewhere_it_is_one_plain_line_for_each_variant() -> None:
    assert show(terminal=False) == (
        "[1/2] stack 16x16384 auto@[bold]: ok in 1 s\n[2/2] next: skipped in 0 s: no time\n"
    )


def test_on_a_terminal_the_variant_that_runs_has_its_time() -> None:
    text = show(terminal=True)
    assert "\x1b[" in text
    assert "of at most 300 s" in text and "auto@[bold]" in text and "0/2 variants" in text
    assert "[1/2] stack 16x16384 auto@[bold]: ok in 1 s" in text


def test_a_record_is_described_in_one_line() -> None:
    variant = Variant("auto", "auto")
    whole = Record("plan", Case(), variant, "ok", "", 12.4, Result(step_ms=STEP, memory=Memory(0, 3 << 29, 0, 0, 0)))
    assert describe(whole) == "stack 16x16384 auto: ok in 12 s: 727.5 ms, 1.50 GiB"
    failed = Record("plan", Case(), variant, "failed", "exit status 1", 3.0, Result())
    assert describe(failed) == "stack 16x16384 auto: failed in 3 s: exit status 1"
    partial = Record("plan", Case(), variant, "partial", "link: x", 3.0, Result(step_ms=STEP))
    assert describe(partial) == "stack 16x16384 auto: partial in 3 s: 727.5 ms; link: x"

"""Progress of a run, on stderr. On a terminal: a bar over the variants and one over the time of the variant that runs.
Anywhere else: a plain line for each variant that ended."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import Progress, ProgressColumn, Task, TextColumn
from rich.progress_bar import ProgressBar
from rich.text import Text

from benchmarks.derived import case_label
from benchmarks.schema import Record

GIB = 1 << 30
BAR_WIDTH = 30


class RunProgress:
    """Of ``num_wanted`` measurements. ``console``: for tests; otherwise stderr."""

    def __init__(self, num_wanted: int, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, soft_wrap=True)
        self._num_wanted, self._num_ended = num_wanted, 0
        columns = (TextColumn("{task.description}", markup=False), _Bar(), _Figures())
        self._bars = Progress(
            *columns, console=self._console, transient=True, disable=not self._console.is_terminal, refresh_per_second=4
        )
        self._all = self._bars.add_task("all", total=num_wanted, timed=False)
        self._current = self._bars.add_task("", total=None, timed=True, visible=False)

    def __enter__(self) -> RunProgress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bars.stop()

    def begin(self, label: str, limit_s: float) -> None:
        """``label`` begins and is ended after ``limit_s`` seconds at the latest."""
        self._bars.reset(self._current, total=max(limit_s, 0.0), description=label, visible=True)

    def end(self, line: str) -> None:
        """What began has ended; ``line`` says how, and stays on the screen."""
        self._num_ended += 1
        self._bars.update(self._all, completed=self._num_ended)
        self._bars.update(self._current, visible=False)
        self._console.print(f"[{self._num_ended}/{self._num_wanted}] {line}", markup=False, highlight=False)


def describe(record: Record) -> str:
    """One line: how it ended, the step and the peak where there are any, and why it is not whole."""
    step, memory = record.result.step_ms, record.result.memory
    figures = [] if step is None else [f"{step.median:.1f} ms"]
    figures += [f"{memory.peak_bytes / GIB:.2f} GiB"] if memory is not None and memory.peak_bytes else []
    said = "; ".join(part for part in (", ".join(figures), record.reason) if part)
    line = f"{case_label(record.case)} {record.variant.label}: {record.status} in {record.wall_s:.0f} s"
    return f"{line}: {said}" if said else line


class _Bar(ProgressColumn):
    """Of the variant that runs: its time, of the time it may take."""

    def render(self, task: Task) -> ProgressBar:
        done = (task.elapsed or 0.0) if task.fields["timed"] else task.completed
        return ProgressBar(total=task.total, completed=min(done, task.total or done), width=BAR_WIDTH)


class _Figures(ProgressColumn):
    def render(self, task: Task) -> Text:
        if not task.fields["timed"]:
            return Text(f"{task.completed:.0f}/{task.total:.0f} variants, {task.elapsed or 0.0:.0f} s")
        limit = "" if task.total is None else f" of at most {task.total:.0f} s"
        return Text(f"{task.elapsed or 0.0:.0f}{limit}")

"""The plans that ``fxoffload.plans()`` lists: the data of a plan, and the ways to show and to keep it."""

from __future__ import annotations

import json
import os

from fxoffload.files import replace_file
from fxoffload.plan_report import json_form, plot, table
from fxoffload.plan_report.blocks import as_html
from fxoffload.plan_report.timeline import to_chrome_trace
from fxoffload.planner.plan import PlanData, why_not_measured

# Not in the JSON form, which keeps the boundaries of a simulation only.
_NOT_IN_JSON = ("simulation",)


class Plan(PlanData):
    """The plan of one compiled graph, or of a step over several. ``print`` shows it as a table.

    The attributes are those of ``PlanData``.
    """

    def __str__(self) -> str:
        return table.render(self)

    def _repr_html_(self) -> str:
        """The same table in a notebook."""
        return as_html(table.blocks_of(self))

    def __repr__(self) -> str:
        return f"<{table.describe(self)}>"

    def to_json(self) -> str:
        """The plan as JSON text; ``from_json`` gives an equal one. Of its simulation, the boundaries are kept.

        Raises:
            ValueError: a field has another type than it should, or a number is not finite.
            TypeError: something has no JSON form.
        """
        return json_form.dumps(self, skip=_NOT_IN_JSON)

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan that ``to_json`` wrote.

        Raises:
            ValueError: the text is damaged, is no plan, or is one of another version.
        """
        return json_form.loads(Plan, text, "a plan", skip=_NOT_IN_JSON)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the simulated step for Perfetto (ui.perfetto.dev) or ``chrome://tracing``: the tracks compute, D2H and
        H2D, with arrows from each offload to its reload, and the bytes on the device. The measured step is a process
        of its own; where there is none, ``otherData`` in the file says why there is none.

        Raises:
            RuntimeError: the plan has no simulation.
            OSError: the file cannot be written.
        """
        if self.simulation is None:
            raise RuntimeError(
                "expected a plan with its simulation, found one without (JSON does not keep it); "
                "call save_trace on a plan of fxoffload.plans() or fxoffload.plan(), not on one that was read from JSON"
            )
        about = {"plan": table.describe(self), "summary": self.summary}
        if reason := why_not_measured(self):
            about["measured step"] = reason
        trace = {**to_chrome_trace(self.simulation, self.measured_step), "otherData": about}
        replace_file(path, json.dumps(trace).encode())

    def plot(self, path: str | os.PathLike[str], *, size_inches: tuple[float, float] = (12.0, 4.8)) -> None:
        """Draw memory over the step, simulated and measured, and the frontier of peak against time, with matplotlib.
        Where no step was measured, a line below says why.

        Args:
            path: the file to write; its ending says the format (.png, .svg, .pdf; without one it is a PNG).
            size_inches: width and height; 150 pixels each.

        Raises:
            ImportError: there is no matplotlib.
            RuntimeError: the plan has no simulation, and no boundaries of one.
            ValueError: matplotlib cannot write that format.
            OSError: the file cannot be written.
        """
        replace_file(path, plot.draw(self, path, size_inches))

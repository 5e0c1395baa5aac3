"""``fxoffload plan``: does a model fit, from its configuration alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from fxoffload.plan_config import Fit

_GIB = 2**30


def plan(
    model: Annotated[Path, typer.Argument(help="A folder with a config.json of transformers, or such a file.")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens in each row of the batch.")] = 4096,
    batch: Annotated[int, typer.Option(min=1, help="Rows.")] = 1,
    layers: Annotated[int | None, typer.Option(min=1, help="Instead of as many as the configuration says.")] = None,
    device: Annotated[
        str, typer.Option(help="a100, a100-40gb, b200, gh200, h100 or h200, or the file of a profile.")
    ] = "h200",
    budget: Annotated[
        str | None, typer.Option(help="activation_budget: 12GiB, auto (what the rest leaves) or 80%.")
    ] = None,
    slowdown: Annotated[float | None, typer.Option(min=0.0, help="max_slowdown; 0.02 without a budget.")] = None,
    lora: Annotated[int | None, typer.Option(min=1, help="Rank of adapters on all linear layers.")] = None,
    optimizer: Annotated[str, typer.Option(help="adamw, adafactor, sgd or none.")] = "adamw",
    ranks: Annotated[int, typer.Option(min=1, help="GPUs that share parameters, gradients and state.")] = 1,
    dtype: Annotated[str, typer.Option(help="Of parameters: bfloat16, float16 or float32.")] = "bfloat16",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    plot: Annotated[Path | None, typer.Option(dir_okay=False, help="Draw memory over the step here.")] = None,
    trace: Annotated[Path | None, typer.Option(dir_okay=False, help="Write a trace for Perfetto here.")] = None,
) -> None:
    """Say whether a model fits a GPU, without weights and without a GPU: parameters, gradients, optimizer and a step's
    activations, with Inductor, with checkpointing and with fxoffload.

    Exit status 0 where fxoffload's plan fits, 1 where it does not or where there is no plan, 2 for a wrong option.
    Where no plan meets the budget, a message on stderr says the smallest; --json prints it as "smallest_budget_bytes",
    next to "error".
    """
    from fxoffload.errors import FxOffloadError
    from fxoffload.plan_config import plan_config
    from fxoffload.progress import working

    try:
        with working(f"planning {model}"):
            found = plan_config(
                model,
                tokens=tokens,
                batch=batch,
                layers=layers,
                device=device,
                lora=lora,
                optimizer=optimizer,
                ranks=ranks,
                dtype=dtype,
                activation_budget=budget,
                max_slowdown=slowdown,
            )
    except FxOffloadError as error:
        if as_json:
            typer.echo(json.dumps(_failure(error), indent=1))
        raise
    if plot is not None:
        found.plan.plot(plot)
    if trace is not None:
        found.plan.save_trace(trace)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=1))
    else:
        show(found, ranks)
    if not found.fits(found.rows[-1]):
        raise typer.Exit(1)


def _failure(error: Exception) -> dict[str, Any]:
    """For JSON. Bytes are a step's, as of ``activation_budget``; left out where they are not known."""
    peaks = {
        "smallest_budget_bytes": getattr(error, "smallest_bytes", None),
        "inductor_peak_bytes": getattr(error, "inductor_bytes", None),
        "checkpointing_peak_bytes": getattr(error, "checkpointing_bytes", None),
    }
    return {"error": str(error), **{name: nbytes for name, nbytes in peaks.items() if nbytes is not None}}


def show(found: Fit, ranks: int = 1) -> None:
    """Print tables: what stays on the device, the ways to train, the budgets that are met."""
    console, stays = Console(), found.lasting
    each = f" on each of {ranks}" if ranks > 1 else ""
    console.print(f"{found.model}; {found.plan.device}, {stays.device / _GIB:.1f} GiB\n")
    console.print(
        f"parameters {stays.parameters / _GIB:.2f} GiB and optimizer {stays.state / _GIB:.2f} stay{each}; gradients "
        f"take {stays.gradients / _GIB:.2f}\n"
    )
    rows = Table("", "step ms", "a step adds, GiB", "in all, GiB", "")
    for row in found.rows:
        fits = "[green]fits" if found.fits(row) else "[red]does not fit"
        rows.add_row(
            row.name, f"{row.step_ms:.1f}", *(f"{n / _GIB:.2f}" for n in (row.step_bytes, row.total_bytes)), fits
        )
    console.print(rows)
    console.print(f"A step adds activations and {_about_gradients(found, ranks)}\n")
    for floor in found.plan.floors:
        console.print(f"- with every plan, {escape(floor)}")
    if found.plan.frontier:
        points = Table("activation_budget, GiB", "step ms")
        for point in found.plan.frontier:
            points.add_row(f"{point.budget_bytes / _GIB:.2f}", f"{point.step_ms:.1f}")
        console.print(points)
    console.print(f"{escape(found.plan.summary)}. By estimate, before anything ran.")


def _about_gradients(found: Fit, ranks: int) -> str:
    if ranks > 1:
        return "each rank's part of the gradients."
    nbytes = f"{found.lasting.gradients / _GIB:.2f} GiB"
    return f"the gradients that there are at its peak. Where they stay for several backwards: up to {nbytes} more."

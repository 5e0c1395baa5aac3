"""The command line: ``run``, ``suite``, ``list``; and of results ``report``, ``compare``, ``plot``, ``publish``."""

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from tabulate import tabulate

from benchmarks import moe_convert
from benchmarks.arguments import (
    CASES,
    KINDS,
    SHARED_OPTIONS,
    check_stock_cases,
    expand_set,
    parse_beside,
    parse_cases,
    parse_protocol,
    parse_variants,
    split_settings,
)
from benchmarks.compare import compare as compare_reports
from benchmarks.compare import parse_percent
from benchmarks.compare import render as render_comparison
from benchmarks.load import load
from benchmarks.load import render as render_any
from benchmarks.rl.variants import KINDS as PHASE_KINDS
from benchmarks.rl.variants import SCENARIOS as PHASE_SCENARIOS
from benchmarks.rl.variants import parse_variants as parse_phase_variants
from benchmarks.runner import run as run_all
from benchmarks.scenarios import COLLECTIVES, FSDP, FSDP_LENGTHS, SCENARIOS, STOCK, STOCK_FSDP, find_scenario
from benchmarks.stock.models import SHARDED_CASES, WHOLE_CASES
from benchmarks.tables import render

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def main() -> None:
    # As an interrupt does, so that what has begun ends its own processes: those of a run are in sessions of their own.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    app(args=expand_set(sys.argv[1:]))


@app.command()
def run(
    scenario: Annotated[str, typer.Argument(help=f"One of: {', '.join([*SCENARIOS, moe_convert.NAME])}.")],
    out: Annotated[Path, typer.Option(help="Folder for <scenario>.json.")],
    settings: Annotated[list[str], typer.Option("--set", help="name=value ..., name=a,b sweeps; see list.")] = [],  # noqa: B006
    variants: Annotated[str | None, typer.Option(help="Comma-separated; options after @.")] = None,
    deadline_s: Annotated[float, typer.Option(help="Nothing runs beyond this many seconds.")] = 3600.0,
    resume: Annotated[
        Path | None, typer.Option(help="An earlier JSON: what it measured is not measured again.")
    ] = None,
) -> None:
    """Measure a scenario, and print a Markdown table. One process per variant, or (sweeps) per case."""
    if scenario == moe_convert.NAME:
        run_conversions(settings, variants, out)
        return
    try:
        chosen = find_scenario(scenario)
        values = split_settings(settings)
        cases = parse_cases(values, chosen.case_defaults)
        protocol = parse_protocol(values, chosen.protocol_defaults)
        words = variants or chosen.variants
        of_phases = scenario in PHASE_SCENARIOS
        asked = (
            parse_phase_variants(scenario, words, *values.get("verl", []))
            if of_phases
            else parse_beside(words)
            if chosen.name == COLLECTIVES
            else parse_variants(words, values)
        )
        check_stock_cases(chosen.name, cases)
        if resume is not None and not resume.exists():
            raise ValueError(f"expected an earlier report to resume, found no {resume}")
        if protocol.process_group and chosen.name not in (FSDP, FSDP_LENGTHS):
            raise ValueError(f"process_group is for scenarios {FSDP} and {FSDP_LENGTHS}; found {chosen.name}")
        if chosen.name == COLLECTIVES and protocol.ranks < 2:
            raise ValueError(f"collectives needs at least 2 ranks, found ranks={protocol.ranks}")
        if chosen.name == "max-seq" and not (protocol.lengths or all(v.lengths for v in asked)):
            raise ValueError(
                "max-seq needs --set lengths=8192,16384,... or variants such as inductor@lengths=8192+16384"
            )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    measured = run_all(chosen, cases, asked, protocol, out, deadline_s, resume)
    typer.echo(render(measured))
    if all(record.status != "ok" for record in measured.records):
        raise typer.Exit(1)


def run_conversions(settings: list[str], variants: str | None, out: Path) -> None:
    """The scenario that runs no model has variants and settings of its own."""
    try:
        asked = variants.split("+") if variants else list(moe_convert.WORK)
        measured = moe_convert.run(moe_convert.parse_protocol(settings), asked, out)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(moe_convert.render(measured))


@app.command()
def suite(
    out: Annotated[Path, typer.Option(help="Folder for a folder and a log of each run.")],
    only: Annotated[str | None, typer.Option(help="Names of runs, comma-separated; see suite.py.")] = None,
    settings: Annotated[list[str], typer.Option("--set", help="Of every run, such as verl=PATH trl=PATH.")] = [],  # noqa: B006
    gpus: Annotated[str | None, typer.Option(help="Such as 0,1; otherwise all that are visible.")] = None,
    deadline_s: Annotated[float, typer.Option(help="Nothing runs beyond this many seconds.")] = 7200.0,
) -> None:
    """Run what the published tables are made from, several at once on several GPUs; what OUT has is not run again."""
    from benchmarks.run_suite import Process, choose, find_gpus, said_by_report, take_turns

    try:
        runs = choose(only)
        given = [f"{name}={','.join(found)}" for name, found in split_settings(settings).items()]  # whole paths
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    outcomes = take_turns(
        runs,
        gpus.split(",") if gpus is not None else find_gpus(),
        deadline_s,
        start=lambda run, taken, limit_s: Process(run, taken, limit_s, out, given),
        said_by=lambda run: said_by_report(run, out),
        tell=lambda line: typer.echo(line, err=True),
    )
    rows = [{"run": one.run.name, "rows": one.said, "s": f"{one.seconds:.0f}"} for one in outcomes]
    typer.echo(tabulate(rows, headers="keys", tablefmt="github"))


@app.command()
def report(
    results: Annotated[list[Path], typer.Argument(help="JSON files that run wrote.")],
    plots: Annotated[Path | None, typer.Option(help="Also draw what can be drawn, into this folder.")] = None,
) -> None:
    """Print the tables, claims and failures of earlier runs, as one Markdown document."""
    parts = []
    try:
        for path in results:
            text = render_any(load(path))
            if len(results) > 1:
                text = f"## {path.name}\n\n{text}"
            parts.append(text)
            if plots is not None:
                from benchmarks.pictures import draw_all

                plots.mkdir(parents=True, exist_ok=True)
                parts += [f"![{picture.stem}]({picture})" for picture in draw_all(path, plots)]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo("\n\n".join(parts))


app.command("show", hidden=True)(report)  # its name before there was more than one file


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(metavar="A.json", help="A JSON file that run wrote.")],
    after: Annotated[Path, typer.Argument(metavar="B.json", help="Another, of the same cases and variants.")],
    fail_above: Annotated[
        str | None, typer.Option(help="Such as 3%: exit status 1 if a median got worse by more, or a row was lost.")
    ] = None,
) -> None:
    """Print two runs side by side: medians, their ratio, and whether they differ by more than their quartiles."""
    try:
        limit = parse_percent(fail_above) if fail_above is not None else None
        found = compare_reports(load(before), load(after))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(f"A: {before}\nB: {after}\n\n{render_comparison(found)}")
    worse = found.worse(limit) if limit is not None else []
    if worse:
        typer.echo(f"\nworse by more than {fail_above}:\n" + "\n".join(f"- {line}" for line in worse))
        raise typer.Exit(1)


@app.command()
def plot(
    results: Annotated[Path, typer.Argument(help="A JSON file that run wrote, or the -plans.json beside it.")],
    picture: Annotated[Path, typer.Argument(help="The picture to write (.png, .svg, .pdf); needs matplotlib.")],
    also: Annotated[
        list[Path] | None, typer.Option("--also", help="Another run of the same cases: variants that the first lacks.")
    ] = None,
) -> None:
    """Draw peak memory against step time; of phases and rl-step, seconds by variant; of plans, memory over a step."""
    from benchmarks.pictures import draw

    try:
        draw(results, picture, also or [])
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@app.command()
def publish(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; a diff and exit status 1 if any differs.")
    ] = False,
) -> None:
    """Write the published tables into README.md and the documents, from benchmarks/results."""
    from benchmarks.publish import differences, write

    try:
        if check:
            found = differences()
            typer.echo(found, nl=False)
            raise typer.Exit(1 if found else 0)
        for path in write():
            typer.echo(f"written: {path}")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@app.command("list")
def list_everything() -> None:
    """What can be run."""
    for scenario in SCENARIOS.values():
        typer.echo(f"{scenario.name}: {scenario.answers}\n    variants: {scenario.variants}")
    typer.echo(f"{moe_convert.NAME}: {moe_convert.ANSWERS}\n    variants: {'+'.join(moe_convert.WORK)}")
    typer.echo(f"cases: {', '.join(CASES)}")
    typer.echo(f"cases of {STOCK}: {', '.join(WHOLE_CASES)}; of {STOCK_FSDP}: {', '.join(SHARDED_CASES)}")
    typer.echo(f"variants: {', '.join(KINDS)}; offload_all@option=value@option=value passes options to the backend")
    for scenario_name, kinds in PHASE_KINDS.items():
        typer.echo(f"variants of {scenario_name}: {', '.join(kinds)}")
    typer.echo(f"options for all fxoffload variants through --set: {', '.join(SHARED_OPTIONS)}")


@app.command("_moe", hidden=True)
def moe(kind: str, source: Path, target: Path, answer: Path, started: float) -> None:
    """One conversion, started by run."""
    from benchmarks.moe_variants import run_sample

    run_sample(kind, source, target, answer, started)


@app.command("_sweep", hidden=True)
def sweep(asked: Path, folder: Path) -> None:
    """Many measurements, started by run."""
    from benchmarks.sweep import serve_sweep

    serve_sweep(asked, folder)


@app.command("_worker", hidden=True)
def worker(asked: Path, answer: Path) -> None:
    """One measurement, started by run."""
    from benchmarks.worker import serve

    if not serve(asked, answer):
        raise typer.Exit(1)

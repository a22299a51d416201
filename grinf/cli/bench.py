"""`grinf bench`: find the highest request rate inside an SLA; plot, show and compare runs; time kernels."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from grinf.cli.options import settings_command
from grinf.cli.render import CommandResult, Console, Table
from grinf.config.settings import BenchSettings
from grinf.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from grinf.jobs.bench.plan import Plan
    from grinf.jobs.bench.summary import Summary

command = typer.Typer(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})

Run = Annotated[Path, typer.Argument(help="Folder of a run.", metavar="RUN", show_default=False)]


@command.callback()
@settings_command(BenchSettings)
def bench(settings: BenchSettings, console: Console) -> CommandResult:
    r"""Find the highest request rate whose latency stays inside an SLA.

    \b
    grinf bench --sla 100ms
    grinf bench --sla p99:100ms --input-len 100:1000:100 --beams 900,20-300-900 --constrained both
    grinf bench --config bench_configs/quick.toml --budget 10m --resume
    grinf bench --engine grinf --versus hf --beams 16
    """
    from grinf.cli.app import Terminated
    from grinf.jobs.bench.plots import draw_all
    from grinf.jobs.bench.sweep import run_bench

    with console.progress() as on_progress:
        try:
            report = run_bench(settings, on_progress)
        except (KeyboardInterrupt, Terminated):
            console.info("what was measured is kept: the same command with --resume goes on")
            raise
    if report.run is None or report.summary is None:
        return _planned(report.plan)
    plots = draw_all(report.run, report.summary)
    messages = [f"run: {report.run.path} ({len(plots)} plots)"]
    if report.was_complete:
        messages.append("this run was complete: nothing was measured again")
    return _shown(report.summary, report.run.path, messages, report.exit_code)


@command.command()
def show(run: Run) -> CommandResult:
    """Show the tables of a run, from its raw data."""
    from grinf.jobs.bench.run_dir import RunDir
    from grinf.jobs.bench.summary import summarise

    return _shown(summarise(RunDir.open(run)), run, [f"run: {run}"])


@command.command()
def plot(run: Run) -> CommandResult:
    """Make tables and plots of a run again, from its raw data; needs no GPU."""
    from grinf.jobs.bench.plots import draw_all
    from grinf.jobs.bench.run_dir import RunDir
    from grinf.jobs.bench.summary import summarise, write_summary

    folder = RunDir.open(run)
    summary = summarise(folder)
    write_summary(folder, summary)
    paths = draw_all(folder, summary)
    return CommandResult("bench-plot", {"run": run, "plots": paths}, messages=[str(path) for path in paths])


@command.command()
def compare(
    baseline: Run,
    candidate: Annotated[
        Path | None, typer.Argument(help="Run to judge.", metavar="RUN", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Compare runs that did other work, too.")] = False,
    fail_if_slower: Annotated[
        str | None,
        typer.Option(
            help="Exit 5 if a point is slower by more than this for certain, or has no rate.", metavar="5%"
        ),
    ] = None,
) -> CommandResult:
    """Compare a run with a baseline, or show who won an interleaved run."""
    from grinf.jobs.bench.compare import compare_runs
    from grinf.jobs.bench.summary import cells

    limit = None if fail_if_slower is None else _share(fail_if_slower)
    found = compare_runs([baseline] if candidate is None else [baseline, candidate], force=force)
    reasons = [] if limit is None else found.gate(limit)
    columns = [name for name in (found.rows[0] if found.rows else {}) if name != "point"]
    table = Table("", columns, cells(found.rows, columns))
    messages = [f"GATE: {reason}" for reason in reasons]
    messages += [f"differs: {line}" for line in found.differences] + found.notes
    if found.geomean is not None:
        messages.append(f"geometric mean of {len(found.rows)} ratios: {found.geomean:.4g}")
    if any(counts := found.infeasible):
        messages.append(f"points without a rate: {counts[0]} in the baseline, {counts[1]} in the candidate")
    data = {"rows": found.rows, "geomean": found.geomean, "infeasible": found.infeasible}
    data |= {"differences": found.differences, "notes": found.notes, "gate": reasons}
    return CommandResult("bench-compare", data, [table], messages, ExitCode.GATE if reasons else ExitCode.OK)


@command.command()
def kernels(
    ctx: typer.Context,
    op: Annotated[
        str | None, typer.Argument(help="Op to measure; all of them without.", show_default=False)
    ] = None,
) -> CommandResult:
    """Check every kernel against its reference, then time it beside the others."""
    from dataclasses import asdict

    from grinf.jobs.bench.kernels import run_kernel_bench
    from grinf.jobs.bench.summary import cells

    with ctx.ensure_object(Console).progress() as on_progress:
        results = [asdict(result) for result in run_kernel_bench(op, on_progress)]
    columns = list(results[0])
    wrong = any(result["note"].startswith("WRONG") for result in results)
    table = Table("", columns, cells(results, columns))
    code = ExitCode.REJECTED if wrong else ExitCode.OK
    return CommandResult("bench-kernels", {"results": results}, [table], exit_code=code)


def _planned(plan: "Plan") -> CommandResult:
    from grinf.jobs.bench.search import PRESETS
    from grinf.jobs.bench.sweep import block_seconds

    preset = PRESETS[plan.preset]
    requests = preset.requests
    seconds = min(requests / plan.assumed_rps, 10 * preset.max_s)  # No probe of a slow engine lasts longer.
    if plan.rival:
        seconds = 2 * (plan.settings.interleave + 1) * block_seconds(plan.preset)
        requests = int(seconds * plan.assumed_rps)
    rows = [[point.key, f"{requests:,}", f"{seconds:,.0f} s"] for point in plan.points]
    table = Table("dry run", ["point", "requests", f"time at {plan.assumed_rps:g} req/s"], rows)
    total = f"{len(rows)} points, preset {plan.preset}, about {seconds * len(rows) / 60:,.0f} min"
    budget = "" if plan.budget_ns is None else f", stops after {plan.budget_ns / 6e10:g} min"
    points = [{"point": point.key, "requests": requests, "seconds": seconds} for point in plan.points]
    data: dict[str, Any] = {"points": points, "preset": plan.preset, "config_hash": plan.config_hash}
    return CommandResult("bench", data | {"settings": plan.settings.spelled()}, [table], [total + budget])


def _shown(
    summary: "Summary", run: Path, messages: list[str], exit_code: ExitCode = ExitCode.OK
) -> CommandResult:
    from grinf.jobs.bench.summary import footer, notes, tables

    said = notes(summary)
    titles, wrong = ["\n".join(said), ""], any(row["verify"] == "failed" for row in summary.rows)
    shown = [Table(title, *table, wrong) for title, table in zip(titles, tables(summary), strict=False)]
    data = {"run": run, **summary.header, "points": summary.rows, "ratios": summary.ratios, "notes": said}
    return CommandResult("bench", data, shown, [footer(summary), *messages], exit_code)


def _share(text: str) -> float:
    from grinf.config.parse import parse_float

    share = parse_float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= share < 1:
        raise UsageError(f"--fail-if-slower {text} is no share", fix="write 5% or 0.05")
    return share

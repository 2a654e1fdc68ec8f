"""Writes a report: one self-contained page, every figure as PNG, every number as CSV."""

import io
import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import LogFormatter, LogFormatterMathtext

from moe_rl.analysis.comparison import Comparison, compare
from moe_rl.analysis.figures import draw_all
from moe_rl.analysis.page import Section, render
from moe_rl.analysis.plots import looks
from moe_rl.analysis.tables import arm_table, difference_table, run_table
from moe_rl.store import Run, write_atomic
from moe_rl.store.files import writing

DOTS_PER_INCH = 130


def write_report(runs: Sequence[Run], out: Path, command: str) -> Path:
    """Write out/index.html, out/figures/*.png and out/tables/*.csv; returns the page's path.

    Runs of different experiments, models or tasks get sections and figures of their own.  `command` is
    what the page gives as the way to make it again.  Every file is whole at any moment, the page comes last;
    StoreError when one cannot be written.
    """
    comparisons = compare(runs)
    look = looks([arm for comparison in comparisons for arm in comparison.arms])
    for folder in ("figures", "tables"):
        with writing(out):
            (out / folder).mkdir(parents=True, exist_ok=True)
    sections = []
    for comparison in comparisons:
        prefix = f"{_slug(comparison)}-" if len(comparisons) > 1 else ""
        run_rows = run_table(comparison)
        tables = {"runs": run_rows, "arms": arm_table(run_rows), "differences": difference_table(run_rows)}
        figures = draw_all(comparison, look)
        for figure in figures:
            write_png(figure.figure, out / "figures" / f"{prefix}{figure.name}.png")
            tables |= {figure.name: figure.data, f"{figure.name}_bands": figure.bands}
        for name, table in tables.items():
            write_csv(table, out / "tables" / f"{prefix}{name}.csv")
        sections.append(Section(comparison, run_rows, tables["arms"], tables["differences"], figures, prefix))
    page = out / "index.html"
    write_atomic(page, render(sections, out, command))
    return page


def write_png(figure: Figure, path: Path) -> None:
    """Write a figure whole or not at all; a dollar in a name is a dollar, not the start of a formula."""
    content = io.BytesIO()
    for text in figure.findobj(Text):
        text.set_parse_math(False)
    for axis in [axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)]:
        if isinstance(axis.get_major_formatter(), LogFormatterMathtext):  # its ticks are formulas
            axis.set_major_formatter(LogFormatter())
            axis.set_minor_formatter(LogFormatter(labelOnlyBase=False))
    with rc_context({"text.parse_math": False}):  # of labels that are made when drawn
        figure.savefig(content, format="png", dpi=DOTS_PER_INCH)
    write_atomic(path, content.getvalue())


def write_csv(table: pd.DataFrame, path: Path) -> None:
    """Write a table whole or not at all."""
    write_atomic(path, table.to_csv(index=False))


def _slug(comparison: Comparison) -> str:
    name = f"{comparison.experiment}-{comparison.model}-{comparison.task}"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")

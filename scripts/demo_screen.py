"""The demo's two faces: a live screen on a terminal, plain lines elsewhere; and the report."""

import io
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from scripts.demo_story import Note, Story

WIDTH = 100
"""Columns of the picture, and most that the screen takes."""
BESIDE = 14
"""Lines of the screen that are not the story's."""
_BARS = "▁▂▃▄▅▆▇█"
_STYLES = {
    "demo": "cyan",
    "master": "default",
    "fault": "bold red",
    "recovered": "bold green",
    "trouble": "bold magenta",
}


def plain(note: Note) -> str:
    """One line of the story where there is no terminal."""
    return f"{note.at:6.1f} s  {note.kind:9}  {note.text}"


def sparkline(values: Sequence[float], width: int) -> str:
    """`values` as a row of bars, at most `width`, each the mean of its part."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [index * len(values) // count for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def screen(story: Story, steps: int, nodes: Sequence[str], height: int) -> RenderableType:
    """All of the live screen, with as much of the story as `height` lines have room for."""
    body = Group(
        _progress(story, steps),
        _loss(story),
        Text(),
        _nodes(story, nodes),
        _events(story.notes[-max(height - BESIDE, 4) :]),
    )
    return Panel(body, title="elastic-run: a GPT learns Python's standard library", width=WIDTH)


def _progress(story: Story, steps: int) -> RenderableType:
    status = story.status
    grid = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=steps, completed=min(story.step, steps), width=36)
    phase = "over" if story.over else status.phase or "starting"
    where = f"{phase}, round {status.round}, world {status.world_size}"
    grid.add_row(f"step {story.step:>4}/{steps}", bar, where, f"{story.now():.0f} s")
    return grid


def _loss(story: Story) -> RenderableType:
    by_step = dict(story.losses)  # a step that was computed again counts once
    values = [by_step[step] for step in sorted(by_step)]
    last = f"loss {values[-1]:.3f}" if values else "loss"
    return Text.assemble((f"{last:<14}", "default"), (sparkline(values, 72), "blue"))


def _nodes(story: Story, names: Sequence[str]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("node", "state", "rank", "process", "step", "started by"):
        table.add_column(title, min_width=8)
    known = {node.node_id: node for node in story.status.nodes}
    for name in names:
        node = known.get(name)
        if node is None:
            table.add_row(name, Text("away", style="red"))
            continue
        head: tuple[RenderableType, ...] = (name, Text(node.state, style="green"))
        for rank in node.ranks:
            step = str(rank.step) if rank.step else "-"
            table.add_row(*head, str(rank.rank), str(rank.pid), step, rank.started_by)
            head = ("", "")
        if not node.ranks:
            table.add_row(*head)
    return table


def _events(notes: Sequence[Note]) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(justify="right", style="dim", no_wrap=True, min_width=7)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    for note in notes:
        grid.add_row(f"{note.at:.1f} s", Text(note.text, style=_STYLES[note.kind]))
    return Group(Text(), grid)


def summary(report: dict[str, Any]) -> RenderableType:
    """The report as a table and a few lines; `report` is what the JSON file holds."""
    demo = report["demo"]
    table = Table(title="where the time went", title_justify="left", width=WIDTH - 40)
    table.add_column("cause")
    table.add_column("restarts", justify="right")
    table.add_column("seconds lost", justify="right")
    restarts, lost = report["restarts_by_cause"], report["seconds_lost_by_cause"]
    for cause in dict.fromkeys((*lost, *restarts)):
        table.add_row(cause, str(restarts.get(cause, "-")), f"{lost.get(cause, 0.0):.1f}")
    table.add_section()
    table.add_row("all", str(sum(restarts.values())), f"{sum(lost.values()):.1f}")
    share = f"{report['productive_seconds']:.1f} of {report['seconds']:.1f} s"
    fall = f"{demo['first_loss']:.3f} -> {demo['last_loss']:.3f}"
    lines = [
        f"goodput   {report['goodput']:.1%} ({share} spent on steps not computed before)",
        f"loss      {fall} in {report['step']} steps",
    ]
    sample = Panel(Text(demo["sample"].strip()), title="what the model writes", width=WIDTH)
    return Group(table, Text("\n".join(lines)), sample)


def picture(file: Path, last: RenderableType, report: dict[str, Any]) -> None:
    """Write the terminal's picture as SVG: the last screen and the summary."""
    console = Console(
        record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(Text("$ make demo"))
    console.print(last)
    console.print(summary(report))
    text = console.export_svg(title="make demo")
    # Without rich's web fonts: a page that shows the picture should load nothing from elsewhere.
    file.write_text(re.sub(r"@font-face \{.*?\}\s*", "", text, flags=re.DOTALL))

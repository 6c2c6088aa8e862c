"""Draws the percentiles of a server's times over the load: python -m benchmarks.serve_plot FILE.json [FILE.png]

FILE.json is what `bench_serve.py --json FILE.json` has written. Needs matplotlib (the extra `bench`).
"""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.serve_figures import SHARES

PANELS = (("ttft", "First token"), ("time_per_token", "Time per token"), ("latency", "Whole request"))


def plot_if_possible(result: dict[str, Any], path: str, json_file: str | None) -> None:
    """Draw the plot, or say where it can be drawn if there is no matplotlib here."""
    if importlib.util.find_spec("matplotlib") is None:
        print(
            f"no matplotlib here; draw the plot elsewhere: python -m benchmarks.serve_plot {json_file or 'FILE.json'}"
        )
    else:
        print(f"plot: {plot(result, Path(path))}")


def plot(result: dict[str, Any], path: Path) -> Path:
    """One panel for each kind of time, with a line for each percentile, and the output rate. Returns `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = result.get("points") or [result]
    x_key = "offered_request_per_s" if "offered_request_per_s" in points[0] else "concurrency"
    x_label = {"offered_request_per_s": "offered requests/s", "concurrency": "concurrent requests"}[x_key]
    points = sorted(points, key=lambda point: point[x_key])
    figure, panels = pyplot.subplots(1, len(PANELS) + 1, figsize=(4.2 * (len(PANELS) + 1), 4), layout="constrained")
    for axes, (name, title) in zip(panels, PANELS, strict=False):
        for label in SHARES:
            key = f"{name}_{label}_ms"
            some = [point for point in points if key in point]
            x, y = [point[x_key] for point in some], [point[key] for point in some]
            (line,) = axes.plot(x, y, "o-", label=label, markersize=4)
            lowest, highest = [point[f"{key}_min"] for point in some], [point[f"{key}_max"] for point in some]
            axes.fill_between(x, lowest, highest, color=line.get_color(), alpha=0.15)
        axes.set(title=title, ylabel="ms", yscale="log")
    _plot_rate(panels[-1], points, x_key)
    for axes in panels:
        axes.set(xlabel=x_label)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(f"{result['model']}, {result.get('gpu') or 'CPU'}, {points[0]['num_runs']} runs", fontsize=11)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _plot_rate(axes: Any, points: list[dict[str, Any]], x_key: str) -> None:
    """Requests per second beside those offered, or for closed loops output tokens per second."""
    key, unit = ("request_per_s", "requests/s") if x_key.startswith("offered") else ("output_tok_per_s", "tok/s")
    some = [point for point in points if key in point]
    axes.plot([point[x_key] for point in some], [point[key] for point in some], "o-", label="answered", markersize=4)
    if x_key.startswith("offered"):
        offered = [point[x_key] for point in points]
        axes.plot(offered, offered, "--", color="grey", linewidth=1, label="bound: offered")
    axes.set(title="Rate", ylabel=unit)


if __name__ == "__main__":
    source = Path(sys.argv[1])
    print(plot(json.loads(source.read_text()), Path(sys.argv[2]) if len(sys.argv) > 2 else source.with_suffix(".png")))

"""docs/grafana-dashboard.json asks for nothing that /metrics does not have."""

import json
import re
from pathlib import Path
from typing import Any

from nanovllm.entrypoints.server.metrics import _FIGURES, Metrics
from nanovllm.plan.outputs import RequestOutput

PATH = Path(__file__).parents[2] / "docs" / "grafana-dashboard.json"
BOARD = json.loads(PATH.read_text())
PANELS: list[dict[str, Any]] = BOARD["panels"]
QUERIES: list[str] = [target["expr"] for panel in PANELS for target in panel.get("targets", ())]


def rendered_metrics() -> str:
    """/metrics of one of several engines that has answered, refused, offloaded and guessed."""
    metrics = Metrics("m", lambda: {entry: 1 for entry, *_ in _FIGURES}, num_in_queue=lambda: 0, replica="0")
    answer: Any = {"finish_reason": "stop", "num_prompt_tokens": 2, "num_cached_tokens": 1, "token_ids": [1]}
    output: RequestOutput = answer | {"ttft_s": 0.1, "tpot_s": 0.1}
    metrics.answer_ended(output)
    metrics.refused("queue_full")
    return metrics.render().decode()


def test_dashboard_queries_only_metrics_and_labels_that_the_server_has() -> None:
    text = rendered_metrics()
    names = set(re.findall(r"^(nanovllm:\w+)", text, re.MULTILINE))
    labels = set(re.findall(r'[{,](\w+)="', text)) | {"model"}  # a variable of the dashboard
    assert len(QUERIES) > 20
    for query in [*QUERIES, *(variable["query"] for variable in BOARD["templating"]["list"])]:
        assert set(re.findall(r"nanovllm:\w+", query)) <= names, query
        assert set(re.findall(r"by \((\w+)\)", query)) <= labels, query
        assert query.count("(") == query.count(")") and query.count("{") == query.count("}"), query
        for name in re.findall(r"rate\((nanovllm:\w+)", query):
            assert name.endswith(("_total", "_bucket")), f"{name} is not a counter"
    for panel in PANELS:
        for target in panel.get("targets", ()):
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels, target


def test_dashboard_ids_are_unique_and_panels_do_not_overlap() -> None:
    ids = [panel["id"] for panel in PANELS]
    assert len({*ids}) == len(ids)
    cells: set[tuple[int, int]] = set()
    for panel in PANELS:
        place = panel["gridPos"]
        xs, ys = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        own = {(x, y) for x in xs for y in ys}
        assert xs.stop <= 24 and not cells & own, panel["title"]
        cells |= own
        refs = [target["refId"] for target in panel.get("targets", ())]
        assert len({*refs}) == len(refs)


def test_dashboard_takes_its_data_source_from_a_variable() -> None:
    """An exported dashboard names the data source of the Grafana that it comes from, and is empty elsewhere."""
    assert [variable["name"] for variable in BOARD["templating"]["list"]] == ["datasource", "model"]
    for panel in PANELS:
        for owner in (panel, *panel.get("targets", ())):
            assert panel["type"] == "row" or owner["datasource"]["uid"] == "${datasource}", panel["title"]

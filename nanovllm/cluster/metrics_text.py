"""Joins the metrics of several replicas, which are texts in Prometheus' format."""

from collections.abc import Iterable

_HEADS = ("# HELP ", "# TYPE ")


def join_metrics(texts: Iterable[str]) -> str:
    """One text with all samples. The format wants the samples of a metric in one group, under a single head.

    The texts must differ in a label of each sample, such as `replica`.
    """
    heads: dict[str, list[str]] = {}  # by metric: its lines HELP and TYPE
    samples: dict[str, list[str]] = {}
    for text in texts:
        metric = ""
        for line in text.splitlines():
            if line.startswith(_HEADS):
                metric = line.split(" ", 3)[2]
                samples.setdefault(metric, [])
                head = heads.setdefault(metric, [])
                if line not in head:
                    head.append(line)
            elif line:
                samples[metric].append(line)
    lines = (line for metric in heads for line in (*heads[metric], *samples[metric]))
    return "".join(f"{line}\n" for line in lines)

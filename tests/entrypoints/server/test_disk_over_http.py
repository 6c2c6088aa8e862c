"""KV on disk through a server: `usage` and /metrics tell what a restarted one has read."""

from pathlib import Path

import pytest
from http_server import http_server, web_client
from prometheus_client.parser import text_string_to_metric_families

from nanovllm import AsyncLLM

PROMPT = [i % 300 for i in range(1030)]


def ask(model: Path, path: Path) -> tuple[int, dict[str, float]]:
    """Start a server, ask a question, and stop it. Returns the cached tokens and the samples of its metrics."""
    engine = AsyncLLM(model, device="cpu", dtype="float32", num_kvcache_blocks=20, kv_disk_path=str(path))
    with http_server(engine) as url:
        body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
        web = web_client(url)
        usage = web.post("/v1/completions", json=body).raise_for_status().json()["usage"]
        families = text_string_to_metric_families(web.get("/metrics").text)
        found = {sample.name: sample.value for family in families for sample in family.samples}
    engine.close()
    return usage["prompt_tokens_details"]["cached_tokens"], found


@pytest.mark.usefixtures("patient_disk")
def test_restarted_server_reports_what_it_read_from_disk(model: Path, tmp_path: Path) -> None:
    cached, metrics = ask(model, tmp_path)
    assert cached == metrics["nanovllm:disk_hit_tokens_total"] == 0
    cached, metrics = ask(model, tmp_path)
    assert cached == metrics["nanovllm:disk_hit_tokens_total"] == 1024
    assert metrics["nanovllm:disk_extents"] == 4
    assert metrics["nanovllm:disk_bytes"] == sum(file.stat().st_size for file in tmp_path.glob("*/*.kv"))
    assert metrics["nanovllm:disk_loaded_bytes_total"] == 4 * 256 * 512
    assert metrics["nanovllm:disk_misses_total"] == metrics["nanovllm:disk_stored_bytes_total"] == 0
    assert metrics["nanovllm:disk_read_bytes_per_second"] > 0

"""Containerfile and compose.yaml agree with the server and with each other. `make package` runs their linters."""

import json
import re
from pathlib import Path

import yaml

from nanovllm.entrypoints.cli.main import _parser
from nanovllm.entrypoints.server import ServerOptions

ROOT = Path(__file__).parents[2]
CONTAINERFILE = (ROOT / "Containerfile").read_text().replace("\\\n", "")
SERVICE = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["nanovllm"]
DEFAULTS = ServerOptions(served_model_name=("demo",))


def test_container_listens_on_the_network_at_the_port_that_is_published_and_asked_for_health() -> None:
    (command,) = re.findall(r"^CMD (\[.*\])", CONTAINERFILE, re.MULTILINE)
    in_compose = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", SERVICE["command"]).split()
    for words in (json.loads(command), in_compose):
        args = _parser().parse_args(words)
        assert (args.model, args.host) == ("demo", "0.0.0.0") and getattr(args, "port", DEFAULTS.port) == DEFAULTS.port
    assert f"EXPOSE {DEFAULTS.port}\n" in CONTAINERFILE
    assert f"http://127.0.0.1:{DEFAULTS.port}/health" in CONTAINERFILE
    assert SERVICE["ports"] == [f"127.0.0.1:{DEFAULTS.port}:{DEFAULTS.port}"]


def test_container_may_drain_before_it_is_killed() -> None:
    assert int(SERVICE["stop_grace_period"].removesuffix("s")) > DEFAULTS.drain_s


def test_container_keeps_models_and_kernels_in_a_volume_that_its_user_owns() -> None:
    caches = dict(re.findall(r"(XDG_CACHE_HOME|HF_HOME|TRITON_CACHE_DIR)=(\S+)", CONTAINERFILE))
    assert len(caches) == 3 and all(Path("/cache") in (Path(path), *Path(path).parents) for path in caches.values())
    assert "cache:/cache" in SERVICE["volumes"] and "--owner=nanovllm /cache" in CONTAINERFILE
    assert re.findall(r"^USER (\d+)", CONTAINERFILE, re.MULTILINE) == re.findall(r"--uid (\d+)", CONTAINERFILE)

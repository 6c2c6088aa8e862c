"""Schemathesis against `nanovllm serve` with the built-in model: bodies made from its own schema, right and wrong.

    python -m benchmarks.fuzz_server [--seconds 150] [--json fuzz.json] [-- flags of schemathesis]

No answer may have a status of 500 or one that /openapi.json does not name, or a form other than the schema's, and every
request that the schema forbids must be refused. Afterwards the server must still answer correctly and end with status
0. Exits with 1 if one of these conditions fails. tests/entrypoints/server/test_fuzz.py does the same for some seconds
within `make test`, and reads streams.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from urllib.request import Request, urlopen

from benchmarks.server_process import ServerProcess

SERVER = "nanovllm serve --model demo --device cpu --max-model-len 256 --num-kvcache-blocks 8 --max-n 4 --port {port}"
CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"),
    *("unsupported_method", "negative_data_rejection"),
)
PROMPT, ANSWER = "The passkey is 4711.\nThe passkey is", " 4711."


def run_schemathesis(url: str, seconds: int, flags: Sequence[str]) -> int:
    """Run Schemathesis, and return its exit status: 0 without failures."""
    options = ["--checks", ",".join(CHECKS), "--continue-on-failure", "--max-time", str(seconds), "--warnings", "off"]
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", *options, *flags]
    with tempfile.TemporaryDirectory() as directory:  # Schemathesis writes what it has learned about the server
        return subprocess.run(command, cwd=directory).returncode


def still_answers(url: str) -> bool:
    body = json.dumps({"prompt": PROMPT, "max_tokens": len(ANSWER), "temperature": 0}).encode()
    request = Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urlopen(request, timeout=60) as response:
        return bool(json.load(response)["choices"][0]["text"] == ANSWER)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=150, help="how long schemathesis runs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("flags", nargs="*", help="flags of schemathesis run, after --")
    args = parser.parse_args(argv)

    with ServerProcess(SERVER) as server:
        server.wait_until_ready()
        fuzz_status = run_schemathesis(server.url, args.seconds, args.flags)
        is_alive = still_answers(server.url)
        server_status = server.stop()
    result = {"schemathesis_status": fuzz_status, "is_alive": is_alive, "server_status": server_status}
    if args.json is not None:
        args.json.write_text(json.dumps(result) + "\n")
    print(json.dumps(result))
    return 0 if is_alive and fuzz_status == server_status == 0 else 1


if __name__ == "__main__":
    sys.exit(main())

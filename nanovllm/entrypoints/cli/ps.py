"""`nanovllm ps`: this user's servers on this machine, each asked for its health."""

import argparse
import time
import urllib.error
import urllib.request
from typing import Any

from nanovllm.entrypoints.cli.flags import add_command
from nanovllm.entrypoints.server.notes import Note, read_notes

TIMEOUT_S = 5.0
HEAD = ("PID", "URL", "MODEL", "SINCE", "HEALTH")


def add_ps_command(commands: Any) -> None:
    add_command(commands, "ps", "list your servers on this machine, with their health", run_ps, ())


def run_ps(args: argparse.Namespace) -> int:
    rows = [_row(note) for note in read_notes()]
    if not rows:
        print("no servers; nanovllm serve starts one")
        return 0
    widths = [max(map(len, column)) for column in zip(HEAD, *rows, strict=True)]
    for row in (HEAD, *rows):
        print("  ".join(map(str.ljust, row, widths)).rstrip())
    return 0


def _row(note: Note) -> tuple[str, ...]:
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(note.started_s))
    return str(note.pid), note.url, ", ".join(note.models), since, _health(note.url)


def _health(url: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/health", timeout=TIMEOUT_S):
            return "ready"
    except urllib.error.HTTPError as error:
        return f"status {error.code}"
    except OSError:
        return "does not answer"

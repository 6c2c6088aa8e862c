"""`nanovllm cache`: list, check, prune and remove the KV on disk. Engines may use the folder at the same time."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from nanovllm.capabilities.disk.disk_moves import DISK_GRAIN_TOKENS
from nanovllm.capabilities.disk.store import (
    Lock,
    MissError,
    check_extent,
    list_extents,
    list_folders,
    remove_extents,
    remove_file,
)
from nanovllm.entrypoints.cli.flags import add_command
from nanovllm.errors import ConfigError
from nanovllm.utils.arithmetic import format_bytes

MAX_KEPT_GB = 2**30
EXAMPLE = """\
examples:
  nanovllm cache list ~/kv
  nanovllm cache verify ~/kv
  nanovllm cache prune ~/kv --keep-gb 20
  nanovllm cache remove ~/kv --id 3f2a

Exit status: 0 if all is well, 1 if verify finds damaged files, 2 for bad input.
"""
ACTIONS = {
    "list": "list the models whose KV is in the folder, each with its id",
    "verify": "compare all files with their checksums; damaged files are named and removed",
    "prune": "remove the least recently used files, until --keep-gb are left",
    "remove": "remove all files, or the files of one --id",
}


def add_cache_command(commands: Any) -> None:
    about = "list, check, prune and remove the KV that engines keep on disk (kv_disk_path)"
    parser = add_command(commands, "cache", about, run_cache, (), EXAMPLE)
    what = "; ".join(f"{name}: {meaning}" for name, meaning in ACTIONS.items())
    parser.add_argument("action", choices=tuple(ACTIONS), help=what)
    parser.add_argument("path", type=Path, metavar="PATH", help="the folder that engines were given as kv_disk_path")
    parser.add_argument("--id", metavar="ID", help="only the files of this id; the id's first letters are enough")
    parser.add_argument("--keep-gb", type=float, metavar="X", help="GiB that prune leaves")


def run_cache(args: argparse.Namespace) -> int:
    path = args.path.expanduser()
    folders = _folders(path, args.id)
    if args.action == "prune" and args.keep_gb is None:
        raise ConfigError("prune needs the number of GiB to keep; add --keep-gb, such as --keep-gb 20")
    if args.action != "prune" and args.keep_gb is not None:
        raise ConfigError(f"--keep-gb={args.keep_gb:g} has no meaning for {args.action}; leave it out, or use prune")
    if args.action == "list":
        _list(folders)
        return 0
    if args.action == "verify":
        return _verify(folders)
    most_bytes = 0
    if args.action == "prune":
        if not 0 <= args.keep_gb <= MAX_KEPT_GB:
            raise ConfigError(f"--keep-gb={args.keep_gb:g} must be between 0 and {MAX_KEPT_GB}")
        most_bytes = int(args.keep_gb * 2**30)
    num_files, num_bytes = remove_extents(path, most_bytes, folders)
    print(f"removed {num_files:,} files, {format_bytes(num_bytes)}")
    return 0


def _folders(path: Path, prefix: str | None) -> list[Path]:
    folders = list_folders(path)
    if prefix is None:
        return folders
    chosen = [folder for folder in folders if folder.name.startswith(prefix)]
    if len(chosen) != 1:
        known = ", ".join(folder.name[:8] for folder in folders) or "none"
        raise ConfigError(f"--id={prefix} is the beginning of {len(chosen)} ids in {path}; there are {known}")
    return chosen


def _list(folders: list[Path]) -> None:
    total_bytes = 0
    print(f"{'id':10}{'model':32}{'dtype':10}{'rank':8}{'tokens':>12}{'states':>8}{'size':>12}  last used")
    for folder in folders:
        listing = list_extents(folder.parent, [folder])
        about = _about(folder)
        used_s = max((extent.used_s for extent in listing.extents), default=None)
        used = "never" if used_s is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(used_s))
        num_states = sum(extent.is_state for extent in listing.extents)
        num_tokens = f"{(len(listing.extents) - num_states) * DISK_GRAIN_TOKENS:,}"
        size = format_bytes(listing.num_bytes)
        dtype = about.get("dtype", "?").removeprefix("torch.")
        name = about.get("model", "?")
        shown = name if len(name) <= 30 else f"...{name[-27:]}"
        counts = f"{num_tokens:>12}{num_states:>8,}{size:>12}"
        print(f"{folder.name[:8]:10}{shown:32}{dtype:10}{about.get('rank', '?'):8}{counts}  {used}")
        total_bytes += listing.num_bytes
    print(f"{format_bytes(total_bytes)} in all")


def _about(folder: Path) -> dict[str, str]:
    """Read the description that an engine has written into the folder of its files."""
    try:
        about = json.loads((folder / "model.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {name: str(value) for name, value in about.items()} if isinstance(about, dict) else {}


def _verify(folders: list[Path]) -> int:
    num_damaged = num_files = num_bytes = 0
    for folder in folders:
        for extent in list_extents(folder.parent, [folder]).extents:
            try:
                check_extent(extent.path)
                num_files += 1
                num_bytes += extent.num_bytes
            except MissError as error:
                if not extent.path.exists():  # an engine has removed the file since the folder was listed
                    continue
                num_damaged += 1
                print(f"{extent.path}: {error}", file=sys.stderr)
                remove_file(extent.path, Lock(folder.parent))
    print(f"{num_files:,} files are whole, {format_bytes(num_bytes)}; {num_damaged:,} were damaged and are removed")
    return 1 if num_damaged else 0

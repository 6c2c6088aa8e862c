"""Times KV on disk: files against plain reading of the same files, and a restart against the first reading.

    python -m benchmarks.bench_disk --path /data/kv                              # files of Qwen3-0.6B's KV, 2 GiB
    python -m benchmarks.bench_disk --path /data/kv --restart --model demo       # and an engine with the demo model
    python -m benchmarks.bench_disk --path /data/kv --restart --model qwen3-0.6b # random weights, on the GPU if any
    python -m benchmarks.bench_disk --path /data/kv --beside --model qwen3-0.6b  # rates while prompts are written

Plain reading reads the files one after the other in pieces of 8 MiB. Both plain reading and loading start without the
files in the page cache. For a restart, an engine reads a document and is closed, and a new engine answers another
question about the document. With --beside, an engine that writes its prompts to disk reads documents and decodes, and
an engine without a disk does the same. The folder must not exist; it is removed at the end. The last line is JSON.
"""

import argparse
import os
import random
import shutil
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import NUM_RUNS, first_token_s, greedy
from benchmarks.reporting import Samples, report, run_options, versions
from nanovllm import LLM
from nanovllm.capabilities.disk.disk_moves import KEY_BYTES, DiskMoves, Extent
from nanovllm.capabilities.disk.store import DiskStore
from nanovllm.capabilities.disk.tier import DiskBoard
from nanovllm.capabilities.disk.worker import DiskWorker, KVPool
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.checkpoint.read_config import config_without_weights
from nanovllm.entrypoints.cli.console import decode_tok_per_s, prefill_tok_per_s
from nanovllm.offload.streams import ImmediateStreams
from nanovllm.plan.kv_spec import KVCacheSpec

PIECE_BYTES = 8 * 2**20
BLOCK_SIZE = 256
DECODE_TOKENS = 256


class Files:
    """Extents of random bytes in CPU memory, and the worker that transfers them."""

    def __init__(self, path: Path, config: ModelConfig, num_bytes: int) -> None:
        spec = KVCacheSpec(
            num_layers=config.num_layers,
            block_size=BLOCK_SIZE,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            itemsize=2,
        )
        num_blocks = max(1, num_bytes // spec.block_bytes)
        shape = (spec.num_layers, num_blocks, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
        caches = [torch.randint(-(2**15), 2**15, shape, dtype=torch.int16).view(torch.bfloat16) for _ in range(2)]
        pool = KVPool(spec, caches[0], caches[1], ImmediateStreams())
        self.num_bytes = num_blocks * pool.extent_bytes
        self._store = DiskStore(path, 2 * self.num_bytes + 2**30, pool.least_bytes, {}, "benchmark")
        self._board = DiskBoard(1, num_blocks)
        self._worker = DiskWorker(self._store, pool, self._board, 0)
        keys = [i.to_bytes(KEY_BYTES, "little") for i in range(num_blocks)]
        self._extents = [Extent(key, keys[0], bytes(8 * BLOCK_SIZE), 0.0, i, 0, 0) for i, key in enumerate(keys)]
        self._num_loads = 0

    def write(self) -> None:
        self._worker.submit(DiskMoves(self._extents))
        while self._board.num_stored[0] < len(self._extents):
            time.sleep(0.001)
        assert len(self._store) == len(self._extents), "not everything was written"

    def load(self) -> None:
        self._num_loads += 1
        self._worker.submit(DiskMoves((), self._extents, self._num_loads))
        while self._board.ended_load[0] != self._num_loads:
            time.sleep(0.0005)
        assert self._board.num_loaded[0] == len(self._extents), "not everything was loaded"

    def read_plainly(self) -> None:
        piece = bytearray(PIECE_BYTES)
        for path in self._paths():
            with open(path, "rb", buffering=0) as file:
                while file.readinto(piece):
                    pass

    def forget(self) -> None:
        """Drop the files from the page cache."""
        for path in self._paths():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _paths(self) -> list[Path]:
        return sorted(self._store.folder.glob("*.kv"))

    def close(self) -> None:
        self._worker.close()
        self._board.close()

    def gb_per_s(self, work: Callable[[], None]) -> float:
        start_s = time.perf_counter()
        work()
        return self.num_bytes / (time.perf_counter() - start_s) / 1e9


def time_files(path: Path, config: ModelConfig, num_bytes: int, num_runs: int) -> dict[str, Any]:
    files = Files(path, config, num_bytes)
    try:
        result = {"num_bytes": files.num_bytes, "write_gb_per_s": files.gb_per_s(files.write)}
        plain, load = [], []
        for run in range(num_runs + 1):  # the first run is the warm-up
            for rates, work in ((plain, files.read_plainly), (load, files.load)):
                files.forget()
                rates.append(files.gb_per_s(work))
            if run == 0:
                plain.clear()
                load.clear()
    finally:
        files.close()
    shares = Samples(tuple(a / b for a, b in zip(load, plain, strict=True)))
    for name, samples in (("plain_gb_per_s", Samples(tuple(plain))), ("load_gb_per_s", Samples(tuple(load)))):
        result |= samples.as_json(name)
    return result | shares.as_json("load_share")


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {"device": args.device, "max_model_len": args.context + DECODE_TOKENS + 1}
    if args.model != "demo":
        options["load_format"] = "dummy"
    if args.offload:
        options["enable_cpu_offload"] = True
    return options


def time_restart(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Time to the first token of the first reading, and after a restart, which loads only if loading is faster."""
    options = engine_options(args) | {"kv_disk_path": str(path)}
    rng = random.Random(0)
    document = [rng.randrange(200) for _ in range(args.context)]
    seconds: list[float] = []
    cached = 0
    for run in range(2):
        with LLM(args.model, **options) as llm:
            llm.generate([[1, 2, 3]], greedy(4), use_tqdm=False)
            output = llm.generate([[*document, 7 + run]], greedy(4), use_tqdm=False)[0]
            seconds.append(first_token_s(output))
            cached = output["num_cached_tokens"]
    return {
        "first_reading_s": seconds[0],
        "after_restart_s": seconds[1],
        "restart_share": seconds[1] / seconds[0],
        "num_loaded_tokens": cached,
    }


def time_beside(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Rates of prefill and decode while prompts are written, and without a disk, in turn."""
    rates: dict[str, list[float]] = defaultdict(list)
    rng = random.Random(1)
    num_bytes = 0
    for disk in ({}, {"kv_disk_path": str(path), "kv_disk_gb": 64}) * 2:
        name = "writing" if disk else "alone"
        with LLM(args.model, **engine_options(args), **disk) as llm:
            for run in range(args.runs + 1):
                document = [rng.randrange(200) for _ in range(args.context)]
                output = llm.generate([document], greedy(DECODE_TOKENS), use_tqdm=False)[0]
                if run:  # the first run is the warm-up
                    rates[f"{name}_prefill"].append(prefill_tok_per_s(output) or 0.0)
                    rates[f"{name}_decode"].append(decode_tok_per_s(output) or 0.0)
            if disk:
                num_bytes += llm.stats()["num_disk_stored_bytes"]
    assert num_bytes > 0, "nothing was written"
    samples = {name: Samples(tuple(each)) for name, each in rates.items()}
    result: dict[str, Any] = {"num_bytes_written_beside": num_bytes}
    for name, each in samples.items():
        result |= each.as_json(f"{name}_tok_per_s")
    for kind in ("prefill", "decode"):
        shares = samples[f"writing_{kind}"].median / samples[f"alone_{kind}"].median
        result[f"{kind}_share_while_writing"] = shares
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, required=True, help="a folder to be made, on the disk in question")
    parser.add_argument("--preset", default="qwen3-0.6b", help="model whose KV the files hold")
    parser.add_argument("--gib", type=float, default=2.0, help="size of the files")
    parser.add_argument("--runs", type=int, default=NUM_RUNS)
    parser.add_argument("--restart", action="store_true", help="time a restarted engine, too")
    parser.add_argument("--beside", action="store_true", help="time prefill and decode while prompts are written, too")
    parser.add_argument("--model", default="demo", help="model of these engines: demo, or a preset with random weights")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--context", type=int, default=40_000)
    parser.add_argument("--json", help="write the result to this file as well")
    args = parser.parse_args()
    if args.path.exists():
        parser.error(f"{args.path} exists; give a folder that does not")
    result: dict[str, Any] = {"benchmark": "disk", **versions(), **run_options(args), "path": str(args.path)}
    try:
        config = config_without_weights(args.preset)
        result |= time_files(args.path / "files", config, int(args.gib * 2**30), args.runs)
        print(
            f"files of {result['num_bytes'] / 2**30:.1f} GiB: written at {result['write_gb_per_s']:.2f} GB/s; plain "
            f"reading {result['plain_gb_per_s']:.2f}, loading {result['load_gb_per_s']:.2f} GB/s, "
            f"{result['load_share']:.2f} of it"
        )
        if args.restart:
            result |= time_restart(args.path / "engine", args)
            print(
                f"{args.context:,} tokens: first reading {result['first_reading_s']:.2f} s, after a restart "
                f"{result['after_restart_s']:.3f} s, {result['restart_share']:.3f} of it; "
                f"{result['num_loaded_tokens']:,} tokens came from disk"
            )
        if args.beside:
            result |= time_beside(args.path / "beside", args)
            print(
                f"while prompts are written: {result['prefill_share_while_writing']:.3f} of the prefill rate without a "
                f"disk, {result['decode_share_while_writing']:.3f} of the decode rate"
            )
    finally:
        shutil.rmtree(args.path, ignore_errors=True)
    report(result, args.json)


if __name__ == "__main__":
    main()

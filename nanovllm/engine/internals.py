"""Internals: what an engine is built from that no user chooses. Tests replace parts of it, and everyone else leaves it.

These are not options: `Config`, `--help` and docs/options.md do not have them. They are arguments so that a test can
reach, on a CPU and with a tiny model, what otherwise takes a GPU or a long prompt, and need not patch any module:

    LLM(model, device="cpu", internals=Internals(works_ahead=True, staging=StagingSizes(256, 2)))
"""

from dataclasses import dataclass

from nanovllm.core.cpu_split import CpuSplit
from nanovllm.core.kv_spec import StagingSizes
from nanovllm.runner.kv_memory import OffloadEngineFactory, make_offload_engine
from nanovllm.speculation.drafters import Drafter


@dataclass(frozen=True, kw_only=True)
class Internals:
    """`make_offload_engine` is called on every rank, so with several ranks it must be picklable."""

    works_ahead: bool | None = None  # launch a step before the tokens of the last one are back; None: unless on a CPU
    staging: StagingSizes = StagingSizes()
    make_offload_engine: OffloadEngineFactory = make_offload_engine
    cpu_split: CpuSplit | None = None  # instead of the one that start-up measures
    drafters: tuple[Drafter, ...] | None = None  # instead of those that `speculation` names, unless it is off
    always_guesses: bool = False  # as many guesses as allowed, whatever they cost

"""EngineSetup: all decisions about an engine, made and checked before anything is allocated."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from nanovllm.attention.selection import find_backend
from nanovllm.capabilities.cpu_attention.cpu_split import CpuSplit
from nanovllm.capabilities.cpu_attention.threads import attention_cpus
from nanovllm.capabilities.speculation.drafters import Drafter
from nanovllm.capacity.fit import choose, fit_remedy
from nanovllm.capacity.machine import Machine, available_host_bytes
from nanovllm.capacity.make_plan import make_plan
from nanovllm.capacity.plan import CapacityPlan
from nanovllm.capacity.plan_check import check_start
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.checkpoint.quantization import CHECKPOINT_FORMATS
from nanovllm.checkpoint.read_config import load_config
from nanovllm.compat import ENGINE, translated
from nanovllm.config import Config
from nanovllm.device.devices import installed_gpu, memory_in_use, resolve_device
from nanovllm.errors import ConfigError
from nanovllm.models.demo_model import model_path
from nanovllm.plan.kv_spec import StagingSizes, dtype_name
from nanovllm.plan.step_limits import max_model_len
from nanovllm.runner.kv_memory import OffloadEngineFactory, make_offload_engine

logger = logging.getLogger("nanovllm")


@dataclass(frozen=True, kw_only=True)
class Internals:
    """Parts of an engine that only tests replace, and what the command line knows about the requests.

    Internals are not options of `Config`. With internals, a test can run code that otherwise needs a GPU or a long
    prompt, on a CPU and with a tiny model, without patching any module:

        LLM(model, device="cpu", internals=Internals(works_ahead=True, staging=StagingSizes(256, 2)))

    `make_offload_engine` is called on every rank, so with several ranks it must be picklable.
    """

    works_ahead: bool | None = None  # see EngineSetup.works_ahead; None for True on a GPU and False on a CPU
    staging: StagingSizes = StagingSizes()
    make_offload_engine: OffloadEngineFactory = make_offload_engine
    cpu_split: CpuSplit | None = None  # replaces the split that start-up measures
    least_load_tokens: int | None = None  # replaces the measured prefix length from which loading from disk pays
    drafters: tuple[Drafter, ...] | None = None  # replace the drafters that `speculation` names, unless it is off
    max_cpu_expert_rows: int | None = (
        None  # replaces the measured tokens of a step up to which the CPU computes experts
    )
    expert_link_share: int | None = (
        None  # replaces the measured share of experts that the GPU reads by itself, in 256ths
    )
    least_context: int = 0  # tokens that the context must have room for, if `fit` chooses it
    always_guesses: bool = False  # propose as many draft tokens as allowed, regardless of their cost


@dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """The options, the model and the device of an engine, and its plan."""

    config: Config  # as the user gave it, with the options that `fit` chose
    model_config: ModelConfig
    directory: Path | None  # of the checkpoint, or None for a preset
    max_model_len: int  # tokens
    device: torch.device  # of rank 0; if Ray places the ranks, a device of the same kind
    plan: CapacityPlan
    internals: Internals

    @property
    def works_ahead(self) -> bool:
        """Return True if the engine launches a step before the tokens of the previous step are back."""
        chosen = self.internals.works_ahead
        return self.device.type != "cpu" if chosen is None else chosen


def prepare(model: str | Path, options: Mapping[str, Any], internals: Internals = Internals()) -> EngineSetup:
    """Decide and check everything about an engine. The arguments are the same as LLM's.

    Raises ConfigError for invalid options, for a model or a device that cannot run, and for an engine that does not
    fit in memory; CheckpointError for a model that cannot be read.
    """
    given = {name: value for name, value in options.items() if (name, value) != ("tokenizer", str(model))}
    given = translated(given, {each.name for each in fields(Config)} - {"model"}, ENGINE, ConfigError, "LLM")
    stored_format = given.pop("quantization") if given.get("quantization") in CHECKPOINT_FORMATS else None
    config = Config(model=model_path(str(model)), **given)
    stored, directory = load_config(config.model, config.hf_overrides)
    if stored_format is not None:
        stored.check_format(stored_format)
    device = resolve_device(config)
    machine = find_machine(replace(config, device=str(device)))
    asked, choice = (
        config,
        choose(config, given, stored, machine, staging=internals.staging, least_context=internals.least_context),
    )
    if choice.text:
        logger.info("%s", choice.text)
    config, model_config = choice.config, choice.model
    limit = max_model_len(config, model_config)
    _check_parts(config, model_config, device)
    named = replace(config, model=str(model))  # the plan shows the user's name, not the path of the built-in model
    plan = make_plan(named, model_config, machine, staging=internals.staging)
    try:
        check_start(plan)
    except ConfigError as error:
        remedy = fit_remedy(asked, given, stored, machine, staging=internals.staging)
        raise ConfigError(f"{error}{remedy}") from None
    return EngineSetup(
        config=config,
        model_config=replace(model_config, embedding_on_cpu=plan.model.embedding_on_cpu, experts=plan.model.experts),
        directory=directory,
        max_model_len=limit,
        device=device,
        plan=plan,
        internals=internals,
    )


def _check_parts(config: Config, model_config: ModelConfig, device: torch.device) -> None:
    """Raise ConfigError if the requested attention backend or CPU threads are not available.

    Called before any process is started or any weight is loaded.
    """
    dtype = getattr(torch, dtype_name(config, model_config))
    find_backend(config.attn_backend, device, dtype, model_config.head_dim, enforce_eager=config.enforce_eager)
    if config.cpu_attention_threads is not None:
        for rank in range(config.tensor_parallel_size):
            attention_cpus(config.cpu_attention_threads, rank, config.tensor_parallel_size)


def find_machine(config: Config, *, measures_cpu: bool = False) -> Machine:
    """Describe this machine for a plan. A GPU's rates are looked up by its name (capacity/machine.py).

    If there is no GPU and `config` does not ask for the CPU, assume an H200, so that users can plan for a machine that
    they do not have yet. measures_cpu: on a machine with a GPU, also measure the rate of CPU memory.
    """
    if config.device == "cpu":
        return Machine.cpu(available_host_bytes())
    gpu = installed_gpu(config)
    if gpu is None:
        return Machine.gpu(available_host_bytes(), name="an H200, assumed")
    capability, used = (gpu.major, gpu.minor), memory_in_use(gpu)
    machine = Machine.found_gpu(available_host_bytes(), gpu.name, gpu.total_memory, capability, used)
    return machine.with_cpu(measure_cpu_memory(), "measured") if measures_cpu else machine


def measure_cpu_memory(num_bytes: int = 2**29) -> float:
    """Return the rate in bytes per second at which all CPUs together read memory. Takes half a second."""
    data = torch.ones(num_bytes // 4)
    seconds = []
    for _ in range(4):
        start_s = time.perf_counter()
        data.sum()
        seconds.append(time.perf_counter() - start_s)
    return num_bytes / min(seconds)

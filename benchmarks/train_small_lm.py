"""Trains a small language model on the Python sources that are installed here, in about 6 minutes on an H200.

    python -m benchmarks.train_small_lm --out /tmp/small-lm
    python -m benchmarks.train_small_lm --out /tmp/small-lm --contexts 2048 32768 --minutes 4 3
    python -m benchmarks.train_small_lm --out /tmp/small-lm --steps 20 10         # does it run?

Random weights say nothing about how often guesses are right, and machines without a network have no other weights. The
model is a Qwen3 of 57M parameters that reads bytes. The result is an ordinary checkpoint without a tokenizer, in bf16.

Phase 1 learns from short pieces of text, phase 2 from long ones in which much is repeated (training_data.py). The
learning rate follows the time that has passed, so a phase ends in time on any machine. Python's standard library is
held out (python_sources.py). What is printed are the bits per byte of the same held-out bytes, after contexts of each
length; at the end also beyond what was trained, and there with YaRN as well. The last line is JSON, also written to
training.json beside the weights.
"""

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F

from benchmarks.held_out import ROPE_THETA, HeldOut, autocast, yarn
from benchmarks.python_sources import (
    END_TOKEN_ID,
    PACKAGES,
    VOCAB_SIZE,
    join_files,
    library_files,
    package_files,
)
from benchmarks.reporting import report, run_options, versions
from benchmarks.training_data import Crops, LongSequences

# For each phase: the first learning rate, the last one, and the number of warm-up steps
SCHEDULES = ((1.5e-3, 5e-4, 100), (5e-4, 0.0, 1))


@dataclass(frozen=True)
class Phase:
    context: int
    minutes: float
    num_steps: int | None  # instead of the minutes
    first_rate: float
    last_rate: float
    warm_up_steps: int

    def progress(self, step: int, seconds: float) -> float:
        """From 0 to 1, where the phase ends."""
        return seconds / (60 * self.minutes) if self.num_steps is None else step / self.num_steps

    def learning_rate(self, step: int, progress: float) -> float:
        """A cosine from the first rate to the last one, after a warm-up."""
        rate = self.last_rate + (self.first_rate - self.last_rate) * (1 + math.cos(math.pi * progress)) / 2
        return rate * min(1.0, (step + 1) / self.warm_up_steps)


def make_config(args: argparse.Namespace) -> transformers.Qwen3Config:
    return transformers.Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        eos_token_id=END_TOKEN_ID,
        attn_implementation="sdpa",
    )


class Trainer:
    """The model with fp32 weights, and AdamW."""

    def __init__(self, model: nn.Module, device: str) -> None:
        self.model, self._device = model, device
        matrices = [p for p in model.parameters() if p.ndim > 1]
        groups = [{"params": matrices, "weight_decay": 0.1}]
        groups += [{"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=device != "cpu")

    def loss(self, token_ids: torch.Tensor) -> torch.Tensor:
        token_ids = token_ids.to(self._device).long()
        with autocast(self._device):
            logits = self.model(token_ids[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), token_ids[:, 1:].flatten())

    def step(self, token_ids: torch.Tensor, learning_rate: float) -> torch.Tensor:
        """The loss, in nats per token."""
        loss = self.loss(token_ids)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def compile(self, token_ids: torch.Tensor) -> float:
        """Compile for the shape of this batch, and change no weight. Returns the seconds it took."""
        start_s = time.perf_counter()
        self.loss(token_ids).backward()
        self._optimizer.zero_grad()
        return time.perf_counter() - start_s


def run_phase(
    trainer: Trainer,
    phase: Phase,
    next_batch: Callable[[], torch.Tensor],
    evaluate: Callable[[], dict[int, float]],
    evaluate_every: int,
) -> dict[str, Any]:
    result: dict[str, Any] = {"context": phase.context, "compile_s": trainer.compile(next_batch())}
    history: list[dict[str, Any]] = []
    losses: list[torch.Tensor] = []
    num_tokens = 0
    start_s = time.perf_counter()
    while (progress := phase.progress(len(losses), time.perf_counter() - start_s)) < 1:
        batch = next_batch()  # while the device still works on the last step
        losses.append(trainer.step(batch, phase.learning_rate(len(losses), progress)))
        num_tokens += batch[:, 1:].numel()
        if len(losses) > 1:
            losses[-2].item()  # wait for the last step, so that at most two are queued
        if len(losses) % evaluate_every == 0:
            recent = mean_bits(losses[-evaluate_every:])
            history.append({"step": len(losses), "train_bits_per_byte": recent, "bits_per_byte": evaluate()})
            rate = num_tokens / (time.perf_counter() - start_s)
            print(f"{progress:4.0%} {history[-1]}, {rate:,.0f} tok/s", flush=True)
    seconds = time.perf_counter() - start_s
    result |= {"num_steps": len(losses), "num_tokens": num_tokens, "seconds": seconds}
    result |= {"tok_per_s": num_tokens / seconds, "train_bits_per_byte": mean_bits(losses[-20:])}
    result["bits_per_byte"] = evaluate()
    print(result, flush=True)
    return result | {"history": history}


def mean_bits(losses: list[torch.Tensor]) -> float:
    return torch.stack(losses).mean().item() / math.log(2)


def make_phases(args: argparse.Namespace) -> list[Phase]:
    settings = zip(args.contexts, args.minutes, args.steps or (None, None), SCHEDULES, strict=True)
    return [Phase(context, minutes, num_steps, *schedule) for context, minutes, num_steps, schedule in settings]


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train and save. Returns what was measured."""
    start_s = time.perf_counter()
    torch.manual_seed(args.seed)
    files, held_out_tokens = package_files(args.packages), join_files(library_files())
    model = transformers.Qwen3ForCausalLM(make_config(args)).to(args.device)
    num_parameters = sum(p.numel() for p in model.parameters())
    print(f"{num_parameters:,} parameters; {len(files):,} files of {sum(map(len, files)):,} bytes", flush=True)
    if args.compile:
        for layer in model.model.layers:  # all layers share what is compiled
            layer.compile(dynamic=False)
    trainer = Trainer(model, args.device)
    held_out = HeldOut(held_out_tokens, max(args.contexts + args.eval_contexts), args.eval_samples, args.device)
    phases = []
    sources: tuple[Crops | LongSequences, ...] = Crops(files, args.seed), LongSequences(files, args.seed)
    for data, phase in zip(sources, make_phases(args), strict=True):
        next_batch = partial(data.batch, max(1, args.batch_tokens // phase.context), phase.context + 1)
        evaluate = partial(held_out.after_contexts, model, args.contexts)
        phases.append(run_phase(trainer, phase, next_batch, evaluate, args.eval_every))
    save(model, args.out)
    result = run_options(args) | versions() | {"transformers": transformers.__version__, "phases": phases}
    result |= {"num_parameters": num_parameters, "num_train_bytes": sum(map(len, files))}
    result |= {"held_out": beyond(model, held_out, args), "seconds": time.perf_counter() - start_s}
    return result


def save(model: Any, directory: str) -> None:
    """Write config.json and the weights, in bf16. The model itself keeps its fp32 weights."""
    copy = transformers.Qwen3ForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.to(torch.bfloat16).save_pretrained(directory)


def beyond(model: Any, held_out: HeldOut, args: argparse.Namespace) -> dict[str, float]:
    """Bits per byte at all contexts, and for those longer than the trained ones with YaRN as well."""
    trained = max(args.contexts)
    result = {str(context): bits for context, bits in held_out.after_contexts(model, args.eval_contexts).items()}
    for context in (context for context in args.eval_contexts if context > trained):
        settings = model.config.to_dict() | yarn(trained, context)
        extended = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**settings)).to(args.device)
        extended.load_state_dict(model.state_dict())
        result[f"{context} yarn"] = held_out.bits_per_byte(extended, context)
    print(f"held-out bits per byte: {result}", flush=True)
    return result


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, metavar="DIR", help="where the checkpoint is written")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--contexts", type=int, nargs=2, default=[2048, 16384], help="tokens, in each phase")
    parser.add_argument("--minutes", type=float, nargs=2, default=[3.5, 1.5], help="duration of each phase")
    parser.add_argument("--steps", type=int, nargs=2, help="steps of each phase, instead of --minutes")
    parser.add_argument("--batch-tokens", type=int, default=65536, help="tokens of a step")
    parser.add_argument("--packages", nargs="+", default=list(PACKAGES), help="whose sources to train on")
    parser.add_argument("--eval-every", type=int, default=200, metavar="STEPS")
    parser.add_argument("--eval-contexts", type=int, nargs="+", default=[2048, 16384, 32768, 131072], help="at the end")
    parser.add_argument("--eval-samples", type=int, default=12, help="held-out sequences")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="torch.compile; by default on a GPU")
    for name, default in {"hidden-size": 512, "intermediate-size": 1792, "layers": 16, "heads": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    args = parser.parse_args(argv)
    if args.compile is None:
        args.compile = args.device != "cpu"
    return args


def main() -> None:
    args = parse()
    Path(args.out).mkdir(parents=True, exist_ok=True)
    report(train(args), str(Path(args.out) / "training.json"))


if __name__ == "__main__":
    main()

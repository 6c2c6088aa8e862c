"""Which keys should drafts attend to? Compares two choices of equally many keys, with plain torch and no engine.

    newest           the first block and the newest keys
    attention_mass   the first block, the newest block, and those that the last verified token attended to most

A block's attention mass is exp(LSE of the block - LSE of all keys), which is the sum of its attention weights, and here
the mean over all heads and layers. The model first answers without guesses. Then the drafts are replayed: a guess
counts only if those before it were right, so its input is the answer itself, and all drafts of a pass run at once.
"""

import argparse
import random
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.task_prompts import TaskPrompt

BLOCK_SIZE = 256
KEY_SHARE = 8  # drafts attend to one key in so many
NUM_GUESSES = 8
CHOICES = ("newest", "attention_mass")
NextToken = Callable[[torch.Tensor, int], torch.Tensor]  # from logits [rows, vocabulary], and the first row's position


def compare_choices(args: argparse.Namespace, prompts: dict[str, list[TaskPrompt]]) -> list[dict[str, Any]]:
    """Acceptance and tokens per pass by task, temperature and choice."""
    device = "cpu" if args.device == "cpu" or not torch.cuda.is_available() else "cuda"
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, trust_remote_code=False).to(device).eval()
    rows = []
    for task, its_prompts in prompts.items():
        for temperature in args.temperatures:
            counts = {choice: [0, 0, 0] for choice in CHOICES}
            for i, prompt in enumerate(its_prompts):
                draw = sampler(temperature, args.seed + i, model.config.vocab_size)
                answer, cache, masses = answer_of(model, prompt.token_ids, args.tokens, draw)
                for choice in CHOICES:
                    new = replay(model, len(prompt.token_ids), answer, cache, masses, draw, choice)
                    counts[choice] = [a + b for a, b in zip(counts[choice], new, strict=True)]
            for choice, (num_passes, num_tried, num_right) in counts.items():
                row = {"task": task, "temperature": temperature, "choice": choice}
                row |= {"acceptance": num_right / num_tried, "tokens_per_pass": 1 + num_right / num_passes}
                rows.append(row)
                print(f"{row}", flush=True)
    return rows


def sampler(temperature: float, seed: int, vocab_size: int) -> NextToken:
    """Draws with noise that depends only on the seed and the position, as the engine does."""

    def noise(position: int) -> list[float]:
        rng = random.Random(f"{seed} {position}")
        return [rng.expovariate(1.0) for _ in range(vocab_size)]

    def draw(logits: torch.Tensor, position: int) -> torch.Tensor:
        if temperature == 0:
            return logits.argmax(-1)
        exponential = torch.tensor([noise(position + i) for i in range(len(logits))], device=logits.device)
        return (logits.float() / temperature - exponential.log()).argmax(-1)

    return draw


@torch.no_grad()
def answer_of(
    model: Any, prompt: list[int], num_tokens: int, draw: NextToken
) -> tuple[list[int], DynamicCache, list[torch.Tensor]]:
    """The answer without guesses, the keys and values of all tokens but its last, and for each token of the answer the
    attention mass [keys] of the query that it was drawn from; the first has that of the prompt's last token.
    """
    device = model.device
    cache = DynamicCache(config=model.config)
    model.set_attn_implementation("sdpa")
    model.model(torch.tensor([prompt[:-1]], device=device), past_key_values=cache)
    model.set_attn_implementation("eager")  # which returns its weights
    answer: list[int] = []
    masses = []
    for position in range(len(prompt) - 1, len(prompt) - 1 + num_tokens):
        token_ids = torch.tensor([[answer[-1] if answer else prompt[-1]]], device=device)
        output = model(token_ids, past_key_values=cache, output_attentions=True)
        masses.append(torch.stack([weights[0, :, 0].float().mean(0) for weights in output.attentions]).mean(0))
        answer.append(int(draw(output.logits[0], position + 1)))
    model.set_attn_implementation("sdpa")
    return answer, cache, masses


@torch.no_grad()
def replay(
    model: Any,
    num_prompt_tokens: int,
    answer: list[int],
    cache: DynamicCache,
    masses: list[torch.Tensor],
    draw: NextToken,
    choice: str,
) -> tuple[int, int, int]:
    """Draft the known answer. Returns the numbers of passes, of guesses up to the first wrong one, and of right ones.

    Before each pass the newest token, answer[known - 1], has no key yet. The draft begins with it.
    """
    num_passes = num_tried = num_right = 0
    known = 1
    while known < len(answer):
        inputs = answer[known - 1 : known - 1 + NUM_GUESSES][: len(answer) - known]
        num_keys = num_prompt_tokens + known - 1
        keys = chosen_keys(choice, masses[known - 1], num_keys).to(model.device)
        positions = torch.arange(num_keys, num_keys + len(inputs), device=model.device)
        some = DynamicCache(config=model.config)
        for idx, layer in enumerate(cache.layers):
            some.update(layer.keys[:, :, keys], layer.values[:, :, keys], idx)
        token_ids = torch.tensor([inputs], device=model.device)
        logits = model(token_ids, past_key_values=some, position_ids=positions[None]).logits
        drafts = draw(logits[0], num_keys + 1).tolist()
        pairs = list(zip(drafts, answer[known:], strict=False))
        accepted = next((i for i, (draft, right) in enumerate(pairs) if draft != right), len(pairs))
        num_passes, num_right = num_passes + 1, num_right + accepted
        num_tried += min(accepted + 1, len(pairs))
        known += accepted + 1
    return num_passes, num_tried, num_right


def chosen_keys(choice: str, mass: torch.Tensor, num_keys: int) -> torch.Tensor:
    """Indices, in order, of the keys that drafts attend to, out of the first `num_keys`."""
    budget = max(num_keys // KEY_SHARE // BLOCK_SIZE, 3) * BLOCK_SIZE
    if num_keys <= budget:
        return torch.arange(num_keys)
    if choice == "newest":
        return torch.cat([torch.arange(BLOCK_SIZE), torch.arange(num_keys - budget + BLOCK_SIZE, num_keys)])
    blocks = torch.arange(num_keys, device=mass.device) // BLOCK_SIZE
    num_blocks = int(blocks[-1]) + 1
    by_block = torch.zeros(num_blocks, device=mass.device).index_add_(0, blocks, mass[:num_keys])
    by_block[[0, num_blocks - 1]] = torch.inf
    chosen = by_block.topk(budget // BLOCK_SIZE).indices
    return torch.isin(blocks, chosen).nonzero()[:, 0]

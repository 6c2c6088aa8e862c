"""Compares the scores of lm_eval through `nanovllm serve` with the scores of its transformers backend.

    python -m benchmarks.lm_eval_check [--docs 40] [--json scores.json]

Both backends, `local-completions` and `hf`, run the same tasks on the CPU in fp32, offline, with two
models: the built-in one, which copies, and a random Qwen3 whose tokens are parts of words. Every log-likelihood must be
be the same within TOLERANCE for each token, every accuracy and every generated text exactly; otherwise the check exits
with 1. Only where transformers finds two tokens equally likely, within TOLERANCE, may the two texts continue with
different tokens.

The tasks are made of this project's documents. Each prompt has a passage, followed by the first words of one of its
sentences. A model that copies can tell which of four continuations is right, and what follows. The third task is the
perplexity of a whole document, which is longer than the context.
"""

import argparse
import json
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.server_process import ServerProcess
from nanovllm.models.retrieval_model import build_retrieval_model

Json = dict[str, Any]

DOCS = Path(__file__).parents[1] / "docs"
CONTINUATION, QUOTE, PERPLEXITY = "docs_continuation", "docs_quote", "docs_perplexity"
NUM_CHOICES = 4
PASSAGE_SENTENCES = 3
ROLLING_CHARS = 12_000  # length of the document whose perplexity is measured
TOLERANCE = 5e-5  # in log-likelihood per token; the built-in model has logits of 32, which fp32 sums to about 1e-5
REL_TOLERANCE = 1e-4  # in perplexity, the exponential of a mean over words or bytes
EXACT = ("acc", "acc_norm", "exact_match")
MAX_MODEL_LEN = 2048
ROLLING_LEN = MAX_MODEL_LEN - 2  # lm_eval's windows: the API's backend keeps one token for an answer, and one more
VOCAB_SIZE, NUM_TRAINED_TOKENS = 1024, 1000  # the random model's


@dataclass(frozen=True)
class Score:
    """A metric of one task, as computed by both backends."""

    model: str
    task: str
    metric: str
    transformers: float
    nanovllm: float

    @property
    def is_equal(self) -> bool:
        allowed = 0.0 if self.metric in EXACT else REL_TOLERANCE * abs(self.transformers)
        return abs(self.transformers - self.nanovllm) <= allowed


@dataclass(frozen=True)
class Answers:
    """Comparison of both backends' answers to the same requests: the largest difference, and how many differ."""

    model: str
    task: str
    num_answers: int
    max_error_per_token: float | None  # for log-likelihoods, or None for texts
    num_different: int
    num_tied: int = 0  # texts that diverge where two tokens are equally likely; they do not count as different


# -- tasks and a model -------------------------------------------------------------------------------------------


def write_tasks(directory: Path, num_docs: int) -> list[Json]:
    """Write the tasks' documents as JSON lines, and return the tasks as lm_eval takes them."""
    rng = random.Random(0)
    questions = list(_questions(rng, num_docs))
    rolling = [{"page": (DOCS / "design.md").read_text().encode("ascii", "ignore").decode()[:ROLLING_CHARS]}]
    generation = {"until": ["\n"], "max_gen_toks": 64, "do_sample": False}
    return [
        _task(directory, CONTINUATION, questions, output_type="multiple_choice", doc_to_text="{{start}}")
        | {"doc_to_choice": "choices", "doc_to_target": "answer", "metric_list": _metrics("acc", "acc_norm")},
        _task(directory, QUOTE, questions, output_type="generate_until", doc_to_text="{{start}}")
        | {"doc_to_target": "{{rest}}", "generation_kwargs": generation, "metric_list": _metrics("exact_match")},
        _task(directory, PERPLEXITY, rolling, output_type="loglikelihood_rolling", doc_to_text="")
        | {
            "doc_to_target": "{{page}}",
            "metric_list": _metrics("word_perplexity", "byte_perplexity", "bits_per_byte"),
        },
    ]


def _task(directory: Path, name: str, docs: list[Json], **fields: Any) -> Json:
    path = directory / f"{name}.jsonl"
    path.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}}, "test_split": "test"}
    return {"task": name, **data, "target_delimiter": "", "metadata": {"version": 1}, **fields}


def _metrics(*names: str) -> list[Json]:
    return [{"metric": name} for name in names]


def _questions(rng: random.Random, num_docs: int) -> Iterator[Json]:
    passages = [passage for path in sorted(DOCS.glob("*.md")) for passage in _passages(path.read_text())]
    assert len(passages) >= NUM_CHOICES, f"{DOCS} has {len(passages)} passages"
    for i, passage in enumerate(rng.sample(passages, min(num_docs, len(passages)))):
        others = rng.sample([other for other in passages if other is not passage], NUM_CHOICES - 1)
        first, rest = _halves(passage[i % PASSAGE_SENTENCES])
        choices = [_halves(rng.choice(other))[1] for other in others]
        answer = rng.randrange(NUM_CHOICES)
        choices.insert(answer, rest)
        start = "\n".join([*passage, first])
        yield {"start": start, "rest": rest, "choices": choices, "answer": answer}


def _passages(markdown: str) -> Iterator[list[str]]:
    """Sentences that follow each other in a paragraph, in ASCII, so that every byte is a character."""
    for paragraph in re.sub(r"```.*?```", "", markdown, flags=re.DOTALL).split("\n\n"):
        if paragraph.startswith(("|", "#", "-", ">", "    ")) or not paragraph.isascii():
            continue
        sentences = re.split(r"(?<=[.:?!])\s+", " ".join(paragraph.split()))
        long = [each for each in sentences if 40 <= len(each) <= 200 and each.count(" ") >= 5]
        for start in range(0, len(long) - PASSAGE_SENTENCES + 1, PASSAGE_SENTENCES):
            yield long[start : start + PASSAGE_SENTENCES]


def _halves(sentence: str) -> tuple[str, str]:
    """Split a sentence into two halves. The second half begins with a space."""
    words = sentence.split(" ")
    middle = len(words) // 2
    return " ".join(words[:middle]), " " + " ".join(words[middle:])


def write_random_model(directory: Path) -> Path:
    """A small Qwen3 with random weights, whose tokenizer is trained on the documents."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from benchmarks.server_process import END_TOKEN, make_tokenizer

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_MODEL_LEN,
        initializer_range=0.15,  # large enough for likelihoods that differ
        bos_token_id=None,
        eos_token_id=VOCAB_SIZE - 1,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    tokenizer = make_tokenizer(VOCAB_SIZE, NUM_TRAINED_TOKENS, sorted(map(str, DOCS.glob("*.md"))))
    tokenizer.save(str(directory / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_TOKEN}
    (directory / "tokenizer_config.json").write_text(json.dumps(about))
    return directory


# -- the comparison ----------------------------------------------------------------------------------------------


def evaluate(backend: str, tasks: list[Json], **model_args: Any) -> Json:
    """Run lm_eval and return its results and samples."""
    import lm_eval

    found = lm_eval.simple_evaluate(
        model=backend, model_args=model_args, tasks=tasks, device="cpu", bootstrap_iters=0, log_samples=True
    )
    assert found is not None, "lm_eval has no results"
    return dict(found)


def evaluate_both(model: Path, tasks: list[Json]) -> tuple[Json, Json]:
    """Score by transformers, and by a server that is started for it."""
    reference = evaluate("hf", tasks, pretrained=str(model), dtype="float32", max_length=ROLLING_LEN)
    command = f"nanovllm serve --model {model} --device cpu --dtype float32 --max-model-len {MAX_MODEL_LEN}"
    with ServerProcess(f"{command} --num-kvcache-blocks 64 --served-model-name m --port {{port}}") as server:
        server.wait_until_ready()
        sizes = {"max_length": MAX_MODEL_LEN, "num_concurrent": 2, "batch_size": 4}
        url = f"{server.url}/v1/completions"
        found = evaluate("local-completions", tasks, model="m", base_url=url, tokenizer=str(model), **sizes)
    return reference, found


def scores(model: str, reference: Json, found: Json) -> Iterator[Score]:
    for task, metrics in reference["results"].items():
        for name, value in metrics.items():
            metric, has_filter, _ = name.partition(",")
            if has_filter and isinstance(value, float):
                yield Score(model, task, metric, float(value), float(found["results"][task][name]))


def compare_answers(
    model: str,
    reference: Json,
    found: Json,
    num_tokens: Callable[[str], int],
    is_tied: Callable[[str, str], bool],
) -> Iterator[Answers]:
    """Compare both backends, one comparison per task. `num_tokens` counts the tokens of a text. `is_tied` tells whether
    two texts diverge where the reference finds two tokens equally likely.
    """
    for task, samples in reference["samples"].items():
        others = {sample["doc_id"]: sample["resps"] for sample in found["samples"][task]}
        pairs = [
            (arguments, expected[0], given[0])
            for sample in samples
            for arguments, expected, given in zip(
                sample["arguments"], sample["resps"], others[sample["doc_id"]], strict=True
            )
        ]
        if isinstance(pairs[0][1], str):
            different = [(prompt + a, prompt + b) for (prompt, _), a, b in pairs if a != b]
            num_tied = sum(is_tied(*texts) for texts in different)
            yield Answers(model, task, len(pairs), None, len(different) - num_tied, num_tied)
        else:
            errors = [abs(_likelihood(a) - _likelihood(b)) / num_tokens(texts[-1]) for texts, a, b in pairs]
            yield Answers(model, task, len(pairs), max(errors), sum(error > TOLERANCE for error in errors))


def parts_at_tie(
    logits_after: Callable[[list[int]], Sequence[float]], expected: Sequence[int], given: Sequence[int]
) -> bool:
    """Return True if the tokens at which two answers, each with its prompt, diverge are equally likely.

    Return False if one answer is a prefix of the other. logits_after: returns the logits of the next token.
    """
    parting = next((i for i, (a, b) in enumerate(zip(expected, given, strict=False)) if a != b), None)
    if parting is None:
        return False
    logits = logits_after(list(expected[:parting]))
    return abs(logits[expected[parting]] - logits[given[parting]]) <= TOLERANCE


def _likelihood(answer: Any) -> float:
    """Drop lm_eval's flag for greedy texts, which no score uses and which depends on how ties are broken."""
    return float(answer[0] if isinstance(answer, tuple | list) else answer)


def print_table(found: Sequence[Score], answers: Sequence[Answers]) -> None:
    for score in found:
        numbers = f"transformers {score.transformers:.7g}, nanovllm {score.nanovllm:.7g}"
        print(f"{score.model:10}{score.task:20}{score.metric:18}{numbers}{'' if score.is_equal else '  DIFFERENT'}")
    for each in answers:
        error = "" if each.max_error_per_token is None else f", largest error {each.max_error_per_token:.1e} a token"
        counts = f"{each.num_answers} answers, {each.num_different} different, {each.num_tied} part at a tie"
        print(f"{each.model:10}{each.task:20}{counts}{error}")


def check(model_name: str, model: Path, tasks: list[Json]) -> tuple[list[Score], list[Answers]]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model), trust_remote_code=False)
    transformer = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32, trust_remote_code=False)

    def logits_after(token_ids: list[int]) -> list[float]:
        with torch.no_grad():
            logits: list[float] = transformer(torch.tensor([token_ids])).logits[0, -1].tolist()
        return logits

    def is_tied(expected: str, given: str) -> bool:  # each text ended at a line break, which it does not include
        return parts_at_tie(logits_after, tokenizer.encode(f"{expected}\n"), tokenizer.encode(f"{given}\n"))

    reference, found = evaluate_both(model, tasks)
    answers = compare_answers(model_name, reference, found, lambda text: len(tokenizer.encode(text)), is_tied)
    return list(scores(model_name, reference, found)), list(answers)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=int, default=40, help="documents of the tasks that ask questions")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)

    start_s = time.monotonic()
    found: list[Score] = []
    answers: list[Answers] = []
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_CACHE": f"{scratch}/cache"}
        tasks = write_tasks(scratch, args.docs)
        models = {"built-in": build_retrieval_model(scratch / "demo"), "random": write_random_model(scratch / "random")}
        for name, model in models.items():
            more_scores, more_answers = check(name, model, tasks)
            found += more_scores
            answers += more_answers
    print_table(found, answers)
    is_same = all(score.is_equal for score in found) and not any(each.num_different for each in answers)
    result = {
        "is_same": is_same,
        "seconds": round(time.monotonic() - start_s, 1),
        "tolerance_per_token": TOLERANCE,
        "scores": [asdict(score) for score in found],
        "answers": [asdict(each) for each in answers],
    }
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())

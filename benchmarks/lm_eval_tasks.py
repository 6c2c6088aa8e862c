"""lm_eval tasks made of this project's own documents, so that they need no download.

Each document of a task has a passage, which is followed by the first words of one of its sentences. Which of four
continuations is right, and what follows, can be answered by a model that copies. The third task is the perplexity of a
whole document, which is longer than the context.
"""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

DOCS = Path(__file__).parents[1] / "docs"
CONTINUATION, QUOTE, PERPLEXITY = "docs_continuation", "docs_quote", "docs_perplexity"
NUM_CHOICES = 4
PASSAGE_SENTENCES = 3
ROLLING_CHARS = 12_000  # of the document whose perplexity is measured
Json: TypeAlias = dict[str, Any]


def write_tasks(directory: Path, num_docs: int, seed: int = 0) -> list[Json]:
    """Write the tasks' documents as JSON lines, and return the tasks as lm_eval takes them."""
    rng = random.Random(seed)
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
    """The second half begins with a space."""
    words = sentence.split(" ")
    middle = len(words) // 2
    return " ".join(words[:middle]), " " + " ".join(words[middle:])

"""Writes a model directory for a server under test: a preset's config, and a tokenizer as large as its vocabulary.

A preset has no tokenizer, and a machine without a network gets none from the hub. This one is trained on the sources of
Python's standard library, so that text costs a server what it costs with a real one. Token ids beyond the trained ones
are made-up words of letters: every token of a model with random weights has text.

    python -m benchmarks.serve_model DIRECTORY [--preset qwen3-0.6b]
"""

import argparse
import json
import sysconfig
from collections.abc import Iterator
from itertools import count, product
from pathlib import Path
from string import ascii_lowercase

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from nanovllm.checkpoint.files import presets

NUM_TRAINED_TOKENS = 16_000
MAX_POSITIONS = 2**20  # so that the server's max_model_len alone limits a context
END_TOKEN = "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}\n{% endfor %}<|assistant|>\n"
)


def write_model(preset: str, directory: Path) -> None:
    """Write config.json, tokenizer.json and tokenizer_config.json. There are no weights (load_format dummy)."""
    config = json.loads(presets()[preset].read_text()) | {"max_position_embeddings": MAX_POSITIONS}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    library = sorted(str(path) for path in Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    make_tokenizer(config["vocab_size"], NUM_TRAINED_TOKENS, library).save(str(directory / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_TOKEN, "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(about))


def make_tokenizer(vocab_size: int, num_trained_tokens: int, sources: list[str]) -> Tokenizer:
    """A byte-level BPE tokenizer, trained on files, with exactly `vocab_size` tokens, the last of which ends a text."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    num_trained_tokens = min(num_trained_tokens, vocab_size - 1)
    trainer = trainers.BpeTrainer(vocab_size=num_trained_tokens, initial_alphabet=alphabet, show_progress=False)
    trained.train(sources, trainer)
    model = json.loads(trained.to_str())["model"]
    vocab: dict[str, int] = model["vocab"]
    made_up = (word for word in _made_up_words() if word not in vocab)
    while len(vocab) < vocab_size - 1:
        vocab[next(made_up)] = len(vocab)
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_TOKEN, special=True, normalized=False)])
    assert tokenizer.get_vocab_size() == vocab_size, f"{tokenizer.get_vocab_size()} tokens instead of {vocab_size}"
    return tokenizer


def _made_up_words() -> Iterator[str]:
    """Words with a space before them, in byte-level form: Ġaa, Ġab, ..."""
    for length in count(2):
        yield from ("Ġ" + "".join(letters) for letters in product(ascii_lowercase, repeat=length))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIRECTORY")
    parser.add_argument("--preset", default="qwen3-0.6b", choices=sorted(presets()))
    args = parser.parse_args()
    write_model(args.preset, args.directory)


if __name__ == "__main__":
    main()

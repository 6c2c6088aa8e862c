"""The sampling defaults that a model's authors recommend in generation_config.json.

model_config.py reads the end tokens in that file, which belong to the model and are not a default. Importing this
module loads neither torch nor transformers.
"""

from pathlib import Path
from typing import Any

from nanovllm.checkpoint.files import read_json
from nanovllm.errors import CheckpointError, RequestError
from nanovllm.sampling_params import SamplingParams

GENERATION_CONFIG_FILE = "generation_config.json"
# Entry of the file -> field of SamplingParams
_FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def read_sampling_defaults(directory: Path | None) -> dict[str, Any]:
    """Field of SamplingParams -> its value in the generation_config.json of `directory`. Empty without such a file.

    Null entries count as absent. "do_sample": false asks for greedy decoding, which is temperature 0. Raises
    CheckpointError, with the file and the entry, for a value that SamplingParams refuses.
    """
    path = directory / GENERATION_CONFIG_FILE if directory is not None else None
    if path is None or not path.is_file():
        return {}
    content = read_json(path)
    do_sample = content.get("do_sample")
    if not isinstance(do_sample, bool | None):
        raise CheckpointError(f"do_sample={do_sample!r} must be true or false; {_remedy(path)}")
    defaults = {}
    for entry, field in _FIELDS.items():
        if content.get(entry) is None:
            continue
        defaults[field] = content[entry]
        try:
            SamplingParams(**{field: content[entry]})
        except RequestError as error:
            raise CheckpointError(f"{entry}={content[entry]!r}: {error}; {_remedy(path)}") from error
    if do_sample is False:
        defaults["temperature"] = 0.0
    return defaults


def _remedy(path: Path) -> str:
    return f"correct {path}, or ignore it with generation_config='none'"

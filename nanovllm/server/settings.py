"""ServerSettings: what the operator of a server has chosen, apart from the engine's options."""

from dataclasses import dataclass

from nanovllm.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """model_names: the names that clients may call the model by; answers carry the first. max_answers: the most answers
    that one request can ask for, prompts times n.
    """

    model_names: tuple[str, ...]
    max_answers: int = 1024

    def __post_init__(self) -> None:
        if not self.model_names or not all(isinstance(name, str) and name for name in self.model_names):
            raise ConfigError(f"model_names={self.model_names!r} must be one or more names, none of them empty")
        if self.max_answers < 1:
            raise ConfigError(f"max_answers={self.max_answers} must be 1 or more")

"""API keys: where they come from, and how a request's key is compared with them.

Only digests of the keys are kept. All of them are compared, each in constant time, so the time says nothing about any.
"""

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path

from nanovllm.errors import ConfigError

VARIABLE = "NANOVLLM_API_KEY"


def read_api_keys(path: str | None, environment: Mapping[str, str]) -> list[str]:
    """The keys of the environment and of the file. Raises ConfigError for a file or a variable without a usable key.

    A key that is present but empty is refused, because it would leave the server open to everyone.
    """
    keys = []
    if VARIABLE in environment:
        keys.append(_checked(environment[VARIABLE].strip(), VARIABLE))
    if path is not None:
        keys += _read_file(Path(path))
    return keys


def _read_file(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_key_file={str(path)!r} cannot be read: {error}") from error
    numbered = [(number, line.strip()) for number, line in enumerate(lines, 1)]
    keys = [_checked(key, f"{path}, line {number},") for number, key in numbered if key and not key.startswith("#")]
    if not keys:
        raise ConfigError(f"api_key_file={str(path)!r} has no keys; write one per line, or leave the option out")
    return keys


def _checked(key: str, origin: str) -> str:
    """`key`, if it can be sent in a header. The message leaves it out."""
    if not key or not all("!" <= char <= "~" for char in key):
        raise ConfigError(f"{origin} must hold a key of printable ASCII characters without spaces")
    return key


class ApiKeys:
    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in dict.fromkeys(keys)]
        self._salt_secret = secrets.token_bytes(32)

    def __bool__(self) -> bool:
        """Whether there are any. Without keys, everyone may ask."""
        return bool(self._digests)

    def accept(self, authorization: bytes) -> bool:
        """Whether this value of an Authorization header is "Bearer", followed by one of the keys."""
        digest = _digest(_key_of(authorization))
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)

    def cache_salt(self, authorization: bytes) -> str | None:
        """A salt that nobody can guess: the same for each request with the same key, until the server ends.

        None for the only key, which has nobody to be kept apart from.
        """
        if len(self._digests) == 1:
            return None
        return hmac.new(self._salt_secret, _key_of(authorization), hashlib.sha256).hexdigest()


def _key_of(authorization: bytes) -> bytes:
    scheme, _, key = authorization.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()

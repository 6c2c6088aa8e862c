"""Options: each limit and type at its edge, and what the message says."""

import math
from dataclasses import dataclass
from typing import Any

import pytest

from nanovllm.errors import ConfigError
from nanovllm.utils.options import check_options, help_of, option


@dataclass(frozen=True, kw_only=True)
class Options:
    name: str = option(help="a name", group="all", choices=("a", "b"))
    count: int = option(1, help="", group="all", least=1)
    share: float = option(0.5, help="", group="all", above=0, most=1)
    limit: float | None = option(None, help="", group="all", least=0.25, most=1e10)
    words: tuple[str, ...] = option((), help="", group="all")
    entries: dict | None = option(None, help="", group="all", hash=False)
    flag: bool = option(False, help="", group="all")

    def __post_init__(self) -> None:
        check_options(self, ConfigError, "Options.")


def test_options_within_their_limits_are_kept() -> None:
    for given in (
        {"name": "b", "count": 1, "share": 1, "limit": 0.25, "words": 5},  # the class checks the type of words
        {"count": 2**31 - 1, "share": 1e-300, "limit": 10**10, "entries": {"a": 1}, "flag": True},
    ):
        options = Options(**({"name": "a"} | given))  # type: ignore[arg-type]
        assert {name: getattr(options, name) for name in given} == given
    assert help_of(Options, "name") == "a name"
    assert len({Options(name="a", entries={}), Options(name="a", entries={})}) == 1  # it has a hash
    with pytest.raises(TypeError, match="name"):
        Options()


def test_options_outside_their_limits_are_refused_with_value_and_limit() -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"name": "c"}, "name='c' is unknown; choose one of a, b"),
        ({"name": 1}, "name=1 must be a string"),
        *(({"count": count}, f"count={count} must be 1 or more, at most 2147483647") for count in (0, -5, 2**31)),
        *(({"count": count}, f"count={count} must be an integer") for count in (True, 1.0, math.nan, None)),
        *(({"share": share}, f"share={share} must be above 0 and at most 1") for share in (0, -0.0, 1.5, math.nan)),
        *(({"limit": limit}, r"limit=\S+ must be between 0.25 and 1e\+10") for limit in (0.2, math.nan, 1.1e10)),
        ({"limit": "1"}, "limit='1' must be a number or None"),
        ({"entries": [1]}, r"entries=\[1\] must be a dict or None"),
        ({"flag": 1}, "flag=1 must be True or False"),
    ]
    for given, message in bad:
        with pytest.raises(ConfigError, match=rf"^Options\.{message}$"):
            Options(**({"name": "a"} | given))


def test_huge_value_is_cut_off_in_the_message() -> None:
    for value in (10**5000, "x" * 10**6):  # Python does not write integers of more than 4300 digits
        with pytest.raises(ConfigError) as caught:
            Options(name="a", count=value)  # type: ignore[arg-type]
        assert len(str(caught.value)) < 300

"""Makes the flags of the command line from the fields of the classes of options."""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from difflib import get_close_matches
from importlib import import_module
from itertools import groupby
from types import MappingProxyType
from typing import Any, NoReturn, get_args

from nanovllm.config import Config
from nanovllm.errors import ConfigError, install_command
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.options import help_of

RENAMED: dict[tuple[type, str], str] = {(SamplingParams, "seed"): "sampling_seed"}  # Config's seed has the flag --seed
# Fields whose flags `-h` shows, besides the command's own
MOST_USED = (
    *("fit", "max_model_len", "quantization", "gpu_memory_utilization", "tensor_parallel_size"),
    *("temperature", "max_tokens", "host", "port", "api_key_file", "gpu", "context", "host_memory_gb"),
)
CPU_STEP_TOKENS = 512  # about a second with a small model; the progress bar and Ctrl-C wait for the end of a step
# Fields of SamplingParams without a flag: several answers (except for `generate`), other results than text, and values
# that no flag can hold
PYTHON_ONLY = (
    *("n", "detokenize", "logprobs", "prompt_logprobs", "logit_bias", "structured_outputs", "reasoning_tags"),
    "output_kind",
)


def add_flags(
    parser: argparse._ActionsContainer,
    options: type,
    *,
    without: Sequence[str] = (),
    defaults: Mapping[str, str] | None = None,
    about: str | None = None,
) -> None:
    """Add a flag for every field of the dataclass `options`, with the group and the help from the field's metadata.

    Without the flag, the field has its default. without: fields that get no flag. defaults: field -> the help's text
    about the default, if the command sets another default. about: group -> the help's text about the group.
    """
    shown = (field for field in fields(options) if field.name not in without)
    for title, members in groupby(shown, key=lambda field: field.metadata["group"]):
        group = parser.add_argument_group(title, about)
        group.is_of_options = True  # type: ignore[attr-defined]
        for field in members:
            settings = _flag_settings(field, options, (defaults or {}).get(field.name, field.default))
            group.add_argument(flag_name(options, field.name), **settings)


def flag_name(options: type, name: str) -> str:
    return "--" + RENAMED.get((options, name), name).replace("_", "-")


def flag_help(options: type, name: str) -> str:
    """Return the help of a field, with the flags in place of the options that it mentions."""
    return name_flags(help_of(options, name), (options, Config)).replace("%", "%%")  # argparse formats it


def as_flags(args: argparse.Namespace, options: type, without: Sequence[str] = ()) -> list[str]:
    """Return the flags of the fields of `options` that were given. without: fields that are left out."""
    found: list[str] = []
    for field in fields(options):
        value = given_fields(args, options).get(field.name)
        if value is None or field.name in without:
            continue
        name = flag_name(options, field.name)
        if field.type in (bool, bool | None):
            found.append(name if value else f"--no-{name[2:]}")
        elif isinstance(value, list | tuple):
            found += [name, *map(str, value)]
        else:
            found += [name, value if isinstance(value, str) else json.dumps(value)]
    return found


def given_fields(args: argparse.Namespace, options: type) -> dict[str, Any]:
    """Return the fields of `options` whose flags were given."""
    by_dest = {RENAMED.get((options, field.name), field.name): field.name for field in fields(options)}
    return {name: getattr(args, dest) for dest, name in by_dest.items() if name != "model" and hasattr(args, dest)}


def name_flags(message: str, option_types: Sequence[type]) -> str:
    """Return `message` with flags in place of the fields of `option_types`.

    "add enable_cpu_offload=True" becomes "add --enable-cpu-offload", and "lower max_model_len" becomes "lower
    --max-model-len". A name of one word, such as "model" or "seed", is also an ordinary word, so it is replaced only
    before "=".
    """
    for options in option_types:
        for field in fields(options):
            if field.name not in message:  # far faster than the regular expressions
                continue
            flag = flag_name(options, field.name)
            end = r"(?![\w/-]|\.\w)" if "_" in field.name else "(?==)"
            name = rf"(?<![\w./'\"-])(?:{options.__name__}\.)?{field.name}"
            if field.type in (bool, bool | None):
                message = re.sub(f"{name}=True", flag, message)
                message = re.sub(f"{name}=False", f"--no-{flag[2:]}", message)
            message = re.sub(name + end, flag, message)
    return message


def _flag_settings(field: Field[Any], options: type, default: Any) -> dict[str, Any]:
    """Return the arguments of `add_argument` for a field. default: the default that the help shows."""
    settings: dict[str, Any] = {"default": argparse.SUPPRESS, "help": flag_help(options, field.name)}
    if field.type in (bool, bool | None):
        settings["help"] += " (default: on)" if field.default else ""
        return settings | {"action": argparse.BooleanOptionalAction}
    kind = _scalar_type(field.type)
    metavar = {int: "N", float: "X", str: "TEXT", _json_object: "JSON", _switch: "TEXT"}[kind]
    settings |= {"type": _integer if kind is int else kind, "metavar": metavar}
    if isinstance(field.default, tuple):
        return settings | {"action": "extend", "nargs": "+"}
    if default is not None:
        settings["help"] += f" (default: {default})"
    return settings


def _scalar_type(annotation: Any) -> Any:
    """Return int, float, str, or a parser of JSON or of a switch. For `int | None` or `tuple[int, ...] | list[int]` it
    is int, and for `bool | str` a parser of a switch.
    """
    if annotation in (int, float, str):
        return annotation
    if annotation is dict:
        return _json_object
    if annotation is bool:
        return _switch
    return next(kind for member in get_args(annotation) if (kind := _scalar_type(member)))


def _integer(text: str) -> int:
    """Return an integer. A k or m at the end of the text means thousands or millions."""
    factor = {"k": 1000, "m": 1_000_000}.get(text[-1:].lower(), 1)
    try:
        return int(text if factor == 1 else text[:-1]) * factor
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not an integer, such as 131072, 131k or 1m: {text!r}") from error


def _switch(text: str) -> bool | str:
    """Return True or False for these words, and other texts unchanged."""
    return {"true": True, "false": False}.get(text.lower(), text)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON ({error}): {text}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"not a JSON object: {text}")
    return value


# -- flags that several commands have --------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """Accepts no abbreviated flags, because new flags would make them ambiguous, and reports an error in one line.

    takes_rest: what follows "--" is not parsed, and becomes `rest` of the namespace. remedies: commands of other
    programs -> what to use instead.
    """

    takes_rest = False
    remedies: Mapping[str, str] = MappingProxyType({})

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown flags first. Otherwise a misspelt required flag would be reported as missing."""
        given = list(sys.argv[1:] if args is None else args)
        if self._subparsers is None:
            if self.takes_rest:
                end = given.index("--") if "--" in given else len(given)
                namespace = namespace or argparse.Namespace()
                namespace.rest, given = given[end + 1 :], given[:end]
            for flag in given[: given.index("--")] if "--" in given else given:
                self._check_flag(flag.partition("=")[0])
            if "--model" in self._option_string_actions:
                given = self._name_model(given)
        elif given and not given[0].startswith("-"):
            self._check_command(given[0])
        return super().parse_known_args(given, namespace)

    def _name_model(self, given: list[str]) -> list[str]:
        """Put --model before an argument that belongs to no flag. argparse itself would find an optional argument only
        before the first flag.
        """
        named, i = list[str](), 0
        while i < len(given):
            if not given[i].startswith("-") or given[i] == "-":
                if any(arg.partition("=")[0] == "--model" for arg in (*named, *given[i:])):
                    self.error(f"unexpected argument {given[i]}: the model is given already")
                named.append("--model")
            action, end = self._option_string_actions.get(given[i]), i + 1
            if action is not None and action.nargs is None:
                end += 1
            elif action is not None and action.nargs == "+":
                end = next((n for n in range(end, len(given)) if given[n].startswith("-")), len(given))
            named += given[i:end]
            i = end
        return named

    def _check_command(self, name: str) -> None:
        assert self._subparsers is not None, "called for a parser with commands"
        known = list(self._subparsers._group_actions[0].choices or ())
        if name in known:
            return
        nearest = get_close_matches(name, known, 1, 0.7)
        remedy = f"; {self.remedies[name]}" if name in self.remedies else ""
        self.error(f"unknown command {name}" + (remedy or (f", did you mean {nearest[0]}?" if nearest else "")))

    def _check_flag(self, name: str) -> None:
        if not re.fullmatch(r"--?[A-Za-z][\w-]*", name) or name in self._option_string_actions:
            return
        known = {flag.lstrip("-"): flag for flag in self._option_string_actions}
        nearest = get_close_matches(name.lstrip("-"), known, 1, 0.7)
        self.error(f"unknown flag {name}" + (f", did you mean {known[nearest[0]]}?" if nearest else ""))

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; {self.prog} --help lists what there is\n")


class ShortHelp(argparse.Action):
    """Prints the flags of the command itself, and the most used ones of the classes of options."""

    def __init__(self, option_strings: Sequence[str], dest: str, **settings: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, **settings)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        formatter = parser._get_formatter()
        formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups)
        formatter.add_text(parser.description)
        of_options = [group for group in parser._action_groups if getattr(group, "is_of_options", False)]
        own = [group for group in parser._action_groups if group not in of_options]
        used = [each for group in of_options for each in group._group_actions if each.dest in MOST_USED]
        for title, actions in (*((group.title, group._group_actions) for group in own), ("most used", used)):
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        formatter.add_text(parser.epilog)
        formatter.add_text(f"{parser.prog} --help lists all {len(parser._actions)} flags.")
        print(formatter.format_help(), end="")
        parser.exit()


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Indents help texts enough for most flags to have their help on the same line. The usage has only the arguments
    that a command needs, because a list of all flags would fill the first screen.
    """

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def add_usage(self, usage: str | None, actions: Any, groups: Any, prefix: str | None = None) -> None:
        groups = [group for group in groups if group.required]
        in_groups = [action for group in groups for action in group._group_actions]
        shown = [each for each in actions if each.required or not each.option_strings or each in in_groups]
        super().add_usage(usage, shown, groups, prefix)


def add_command(
    commands: Any,
    name: str,
    about: str,
    run: Callable[[argparse.Namespace], int],
    option_types: Sequence[type],
    epilog: str | None = None,
) -> argparse.ArgumentParser:
    """Add a command that `run` runs. option_types: the classes whose fields are the command's flags."""
    model = {"plan": "[MODEL]", "launch": "AGENT MODEL"}.get(name, "MODEL")
    usage = f"%(prog)s {model} [FLAG ...]" if Config in option_types else None
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=about,
        description=about,
        epilog=epilog,
        usage=usage,
        formatter_class=Formatter,
        add_help=usage is None,
    )
    if usage is not None:
        parser.add_argument("-h", action=ShortHelp, help="show the most used flags")
        parser.add_argument("--help", action="help", help="show all flags")
    parser.set_defaults(run=run, option_types=option_types)
    return parser


def add_model_flag(group: Any) -> None:
    """Add --model. Parser takes an argument without a flag as the model, too."""
    about = flag_help(Config, "model")
    group.add_argument("--model", required=True, metavar="MODEL", help=f"{about}; may be given without --model")


def add_engine_flags(
    parser: argparse.ArgumentParser, defaults: Mapping[str, str] = MappingProxyType({}), without: Sequence[str] = ()
) -> None:
    """Add the flags of Config. `defaults` and `without` mean the same as for `add_flags`."""
    step_tokens = f"{Config.max_num_batched_tokens}; on a CPU, {CPU_STEP_TOKENS}"
    defaults = {"max_num_batched_tokens": step_tokens, **defaults}
    add_flags(parser, Config, without=("model", *without), defaults=defaults)


def engine_options(args: argparse.Namespace) -> Mapping[str, Any]:
    """Return the fields of Config that the flags give, with the command line's step size for a CPU. The engine chooses
    other options so that the model fits. Loads torch.
    """
    options = {"fit": None, "enable_expert_offload": None} | given_fields(args, Config)
    from nanovllm.llm import resolve_device

    if resolve_device(Config(model=args.model, **options)).type == "cpu":
        options = {"max_num_batched_tokens": CPU_STEP_TOKENS} | options
    return options


def check_packages(user: str, names: Sequence[str], extra: str) -> None:
    """Raise ConfigError if a package of an extra is missing. user: the command or option that needs the packages."""
    for name in names:
        try:
            import_module(name)
        except ModuleNotFoundError as error:
            raise ConfigError(f"{user} needs {error.name}; run: {install_command(extra)}") from error

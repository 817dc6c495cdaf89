"""Reads and writes YAML: text stays text, and only plain numbers become numbers.

Scalars follow YAML 1.2, with decimal numbers only. `yes`, `no`, `on`, `off`, `1:30`, `0x1f`, `0o17`, `1_000`, dates and
numbers with padding such as `010` are texts, from which a key of the schema that takes a number reads decimal digits.
"""

import contextlib
import re
from pathlib import Path
from typing import Any

import yaml

from recjax.errors import UserError

_TAG = "tag:yaml.org,2002:"
_WHOLE = r"(?:0|[1-9][0-9]*)"
# In this order: a plain scalar has the type of the first pattern that matches all of the text.
_SCALARS = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (rf"[-+]?{_WHOLE}", list("-+0123456789")),
    "float": (
        rf"[-+]?(?:{_WHOLE}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    "merge": (r"<<", ["<"]),
}
# Decimal numbers, with optional leading zeros and groups of three digits. Python's int() would accept other texts, too.
DECIMAL = re.compile(
    r"[-+]?(?:(?:[0-9]+|[0-9]{1,3}(?:_[0-9]{3})+)(?:\.[0-9]*)?|\.[0-9]+)(?:e[-+]?[0-9]+)?|[-+]?\.?inf|\.?nan", re.I
)
_BREAKS = "\r\n\x85\u2028\u2029"


class _Rules:
    """Rules of both readers: a key that stands twice in a mapping, and a value that holds itself, are errors."""

    yaml_implicit_resolvers = {}

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict:
        seen = set()
        pairs = []
        if isinstance(node, yaml.MappingNode):
            pairs = node.value
        for key, _ in pairs:
            if key.tag == f"{_TAG}merge" or not isinstance(key, yaml.ScalarNode):
                continue
            if (key.tag, key.value) in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands twice", key.start_mark)
            seen.add((key.tag, key.value))
        # The readers inherit the method from their YAML loader.
        return super().construct_mapping(node, deep=deep)  # type: ignore


class _Loader(_Rules, yaml.SafeLoader):
    """Reads YAML in Python; its errors show the line."""


class _FastLoader(_Rules, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
    """Reads YAML with libyaml, seven times as fast; accepts tabs between values."""


class _Literal(_Loader):
    """An override's YAML, which loses no text: line breaks within quotes stay, and comments are errors."""

    def scan_to_next_token(self) -> None:
        start = self.pointer
        mark = self.get_mark()
        super().scan_to_next_token()
        if "#" in self.buffer[start : self.pointer]:
            raise yaml.scanner.ScannerError(None, None, "' #' would begin a comment; put the text in quotes", mark)

    def scan_flow_scalar_spaces(self, double: bool, start_mark: yaml.Mark) -> list[str]:
        length = 0
        while self.peek(length) in f" \t{_BREAKS}":
            length += 1
        if self.peek(length) == "\0":
            return super().scan_flow_scalar_spaces(double, start_mark)
        text = self.prefix(length)
        self.forward(length)
        return [text]

    def scan_plain(self) -> yaml.ScalarToken:
        token = super().scan_plain()
        if token.start_mark.line != token.end_mark.line:
            raise yaml.scanner.ScannerError(
                None, None, "a text of several lines would become one; put it in quotes", token.start_mark
            )
        return token


class _Dumper(yaml.SafeDumper):
    """Writes YAML for `_Loader` and for readers of YAML 1.1: quotes text that either would read as a value."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        style = None
        if any(character in data for character in _BREAKS):
            style = '"'
        return self.represent_scalar(f"{_TAG}str", data, style=style)


for _kind, (_pattern, _first) in _SCALARS.items():
    for _class in (_Loader, _FastLoader, _Dumper):
        _class.add_implicit_resolver(f"{_TAG}{_kind}", re.compile(rf"(?:{_pattern})\Z"), _first)
for _class in (_Loader, _FastLoader):
    _class.add_constructor(f"{_TAG}int", lambda loader, node: int(loader.construct_scalar(node)))
_Dumper.add_representer(str, _Dumper.represent_str)

# The largest number of values in a file.
_MOST_VALUES = 100_000


def read_yaml(text: str, literal: bool = False) -> Any:
    """The value of a YAML document.

    Args:
        literal: refuse comments and folded lines, as for an override, where either would lose text.
    Raises:
        UserError: it is no YAML, or several documents.
    """
    try:
        if literal:
            return _value(_Literal(text))
        # What libyaml refuses is read again, for an error with the line, or for a value that only Python reads.
        with contextlib.suppress(yaml.YAMLError, ValueError, TypeError):
            return _value(_FastLoader(text))
        return _value(_Loader(text))
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise UserError(problem=" ".join(str(error).split())) from error
    except RecursionError as error:
        raise UserError(problem="values are nested too deeply") from error


def _value(loader: yaml.SafeLoader | _FastLoader) -> Any:
    node = loader.get_single_node()
    if node is None:
        return None
    return loader.construct_object(node, deep=True)


def read_yaml_file(path: str | Path) -> Any:
    """The value of a YAML file in UTF-8, with or without a byte order mark.

    Raises:
        UserError: with the path: the file cannot be read, has another encoding, or is no YAML.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        cause = error.strerror or str(error)
        reason = f"not a file that can be read ({cause.lower()})"
        remedy = ""
        if Path(path).parts[:1] == ("experiments",) and not Path("experiments").is_dir():
            remedy = "experiments/ is a folder of recjax's repository: give the command there"
        raise UserError(str(path), reason, remedy) from error
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UserError(str(path), "is in UTF-16 or UTF-32", "save it as UTF-8")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(str(path), f"not UTF-8 ({error.reason} at byte {error.start})", "save it as UTF-8") from error
    try:
        value = read_yaml(text)
    except UserError as error:
        raise UserError(str(path), f"not a valid YAML file ({error})") from error
    # Aliases repeat values, and a few lines of them can stand for billions.
    pending = [value]
    # The list grows in the loop.
    for count, element in enumerate(pending):
        if count == _MOST_VALUES:
            raise UserError(
                str(path),
                f"not a valid YAML file (has more than {_MOST_VALUES:,} values, with those that aliases repeat)",
                "remove aliases",
            )
        if isinstance(element, dict):
            pending += element.values()
        elif isinstance(element, list):
            pending += element
    return value


def write_yaml(value: Any, flow: bool = False) -> str:
    """YAML that `read_yaml` reads back to the same value.

    Args:
        flow: on one line, as an override's value.
    """
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=flow, width=10**9)
    if flow:
        return text.removesuffix("\n...\n").removesuffix("\n")
    return text


def read_scalar(text: str) -> Any:
    """The value of a text without quotes: null, true, false, a number, or the text itself.

    Examples:
        >>> [read_scalar(text) for text in ("1e-6", "null", "010", "no", "run #3")]
        [1e-06, None, '010', 'no', 'run #3']
    """
    plain = text.strip(" ")
    tag = _Loader(" ").resolve(yaml.ScalarNode, plain, (True, False))
    if tag in (f"{_TAG}str", f"{_TAG}merge"):
        return text
    return read_yaml(plain)


def read_override(text: str, takes_text: bool = False, takes_yaml: bool = False) -> Any:
    """The value of an override; keeps all text.

    Args:
        text: everything after the first `=`.
        takes_text: the key takes text: `text` itself, without enclosing quotes; null and empty text are None.
        takes_yaml: the key takes a list, mapping or block. Other keys take YAML that begins as one, or a scalar.
    Raises:
        UserError: no YAML.
    """
    is_quoted = text.lstrip().startswith(("'", '"'))
    if takes_text:
        return _read_text(text, is_quoted)
    if takes_yaml or is_quoted or text.lstrip().startswith(("[", "{")):
        return read_yaml(text, literal=True)
    return read_scalar(text)


def _read_text(text: str, is_quoted: bool) -> str | None:
    """An override of a key that takes text: without enclosing quotes; None for null and for empty text."""
    if text in ("", "null", "~"):
        return None
    if not is_quoted:
        return text
    try:
        value = read_yaml(text, literal=True)
    except UserError:
        return text
    if isinstance(value, str):
        return value
    return text


def write_override(key: str, value: Any) -> str:
    """The `key=value` that `read_override` reads back for any key; on one line."""
    if isinstance(value, str) and value.isprintable() and not value.startswith(("[", "{", "'", '"')):
        # Plain text, if keys of every kind read it as the same text.
        if value and value == read_override(value, takes_text=True) == read_scalar(value):
            return f"{key}={value}"
    return f"{key}={write_yaml(value, flow=True)}"


def read_decimal(value: Any) -> Any:
    """The number that a text has in decimal digits, padded or with `_` between thousands; other values as given.

    Examples:
        >>> [read_decimal(value) for value in ("010", "1_000", "00.5", "0x1f", None)]
        [10, 1000, 0.5, '0x1f', None]
    """
    if not isinstance(value, str) or not DECIMAL.fullmatch(value):
        return value
    if re.fullmatch(r"[-+]?[0-9_]+", value):
        return int(value)
    return float(value.lower().replace(".inf", "inf").replace(".nan", "nan"))

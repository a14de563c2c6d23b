"""From a policy file to a `PolicySet`, or to errors that name file, line, column and a way out.

YAML is read event by event into plain values: no tag, no anchor, no key twice. Positions stay beside
them, so that an error of the models points at the words that caused it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn, get_args, get_origin

from pydantic import ValidationError

from foreshock.policies.models import PolicySet
from foreshock.policies.units import Where, nearest, show

SHIPPED = ("default", "unattended")
MAX_BYTES, MAX_DEPTH = 65_536, 16
"""More than this is a mistake or an attack."""
_PLAIN: dict[str, object] = {"": None, "~": None, "null": None, "true": True, "false": False}
_MESSAGES = {
    "policy": ("{problem}", "{suggestion}"),
    "model_type": ("{value} stands where a mapping of keys is expected", "write `key: value` pairs"),
    "dict_type": ("{value} stands where a mapping of names is expected", "write `name: {{...}}` pairs"),
    "tuple_type": ("{value} stands where a list is expected", "write a list: `[...]`"),
    "string_type": ("{value} is not text", "put it in quotes"),
    "string_too_short": ("an empty text", "write something, or remove the key"),
    "int_type": ("{value} is not a whole number", "write a number without quotes, e.g. 2"),
    "float_type": ("{value} is not a number", "write a number without quotes, e.g. 0.1"),
    "finite_number": ("{value} is not a finite number", "write a number such as 0.1"),
    "greater_than_equal": ("{value} is below {ge}", "write {ge} or more"),
    "greater_than": ("{value} is not above {gt}", "write a number above {gt}"),
    "less_than": ("{value} is not below {lt}", "write a number below {lt}"),
    "too_short": ("an empty list", "at least {min_length} entry is needed"),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One error: what is wrong, where (1-based; line 0 is the file as a whole), and what to write instead."""

    file: str
    line: int
    column: int
    message: str
    suggestion: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        return f"{where}: {self.message}\n  help: {self.suggestion}"


class PolicyError(ValueError):
    """The file is not a policy; `problems` says why, in file order."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)


def load(path: str | Path) -> PolicySet:
    """The policy set in a file (UTF-8). Raises `PolicyError`, also where there is no such file."""
    return loads(_read(Path(path), str(path)), str(path))


def loads(text: str | bytes, source: str = "<string>") -> PolicySet:
    """The policy set in `text`; `source` is the file name that errors show. Raises `PolicyError`."""
    reader = _Reader(_decode(text, source), source)
    try:
        return PolicySet.model_validate(reader.values())
    except ValidationError as error:
        raise PolicyError(_problems(error, reader.marks, source)) from None


def shipped(name: str) -> PolicySet:
    """A policy set that comes with Foreshock: one of `SHIPPED`."""
    if name not in SHIPPED:
        _refuse(name, -1, -1, "no such shipped policy", nearest(name, SHIPPED))
    return resolve(name)


def resolve(name_or_path: str | Path) -> PolicySet:
    """A shipped name or a path. A file called like a shipped policy is reached as `./default`."""
    return loads(*source_text(name_or_path))


def source_text(name_or_path: str | Path) -> tuple[str, str]:
    """The unread text of what `resolve` would load, and the name that errors show: a journal keeps both."""
    name = str(name_or_path)
    if name not in SHIPPED:
        return _decode(_read(Path(name_or_path), name), name), name
    file = resources.files("foreshock.policies").joinpath("library", f"{name}.yaml")
    return file.read_text(encoding="utf-8"), f"{name}.yaml"


def _read(path: Path, source: str) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        _refuse(source, -1, -1, f"cannot be read: {reason}", f"give a file, or one of: {', '.join(SHIPPED)}")


def _decode(text: str | bytes, source: str) -> str:
    if len(text) > MAX_BYTES:
        _refuse(source, 0, 0, f"larger than {MAX_BYTES} bytes", "a policy is a page, not a data set")
    try:
        return text if isinstance(text, str) else text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        *before, line = bytes(error.object[: error.start]).split(b"\n")
        _refuse(source, len(before), len(line), "not UTF-8 text", "save the file as UTF-8")


def _refuse(source: str, line: int, column: int, message: str, suggestion: str) -> NoReturn:
    """`line` and `column` count from 0, as YAML's marks do."""
    raise PolicyError([Problem(source, line + 1, column + 1, message, suggestion)])


class _Reader:
    """YAML events to plain values, and the position of each; refuses everything that is not plain."""

    def __init__(self, text: str, source: str) -> None:
        self.text = text
        self.source = source
        self.marks: dict[Where, tuple[int, int]] = {(): (0, 0)}

    def values(self) -> Any:
        from ruamel.yaml import YAML
        from ruamel.yaml.error import MarkedYAMLError
        from ruamel.yaml.reader import ReaderError

        if tab := re.search(r"^( *)\t(?=[^\n]*\S)", self.text, re.MULTILINE):
            line = self.text.count("\n", 0, tab.start())
            _refuse(self.source, line, len(tab[1]), "a tab in the indentation", "indent with spaces")
        try:
            events = YAML(typ="safe", pure=True).parse(self.text)
            documents: list[Any] = []
            for event in events:
                if type(event).__name__ == "DocumentStartEvent":
                    if documents:
                        self._refuse(event, "a second document", "one file holds one policy set")
                    documents.append(self._value(next(events), events, ()))
        except ReaderError as error:
            *before, last = self.text[: error.position].split("\n")
            _refuse(self.source, len(before), len(last), "a character that YAML does not allow", "remove it")
        except MarkedYAMLError as error:
            begun, mark = error.context_mark, error.problem_mark or error.context_mark
            line, column = (mark.line, mark.column) if mark else (0, 0)
            since = f"{error.context} from line {begun.line + 1}: " if begun else ""
            help = f"{since}check indentation, quotes and brackets"
            _refuse(self.source, line, column, f"not YAML: {error.problem}", help)
        if documents in ([], [None]):
            _refuse(self.source, 0, 0, "the file is empty", "begin with `apiVersion: foreshock/v1`")
        return documents[0]

    def _refuse(self, event: Any, message: str, suggestion: str) -> NoReturn:
        _refuse(self.source, event.start_mark.line, event.start_mark.column, message, suggestion)

    def _value(self, event: Any, events: Iterator[Any], path: Where) -> Any:
        self.marks[path] = event.start_mark.line, event.start_mark.column
        kind = type(event).__name__
        if len(path) > MAX_DEPTH:
            self._refuse(event, "nested too deeply", f"a policy needs no more than {MAX_DEPTH} levels")
        if event.anchor:
            sign = "*" if kind == "AliasEvent" else "&"
            self._refuse(event, f"an anchor or alias '{sign}{event.anchor}'", "write the values out")
        if event.tag:
            self._refuse(event, f"a tag '{event.tag}'", "remove it: policies hold plain values only")
        if kind == "ScalarEvent":
            return _plain(event.value) if event.implicit[0] else event.value
        if kind == "SequenceStartEvent":
            items: list[Any] = []
            while type(event := next(events)).__name__ != "SequenceEndEvent":
                items.append(self._value(event, events, (*path, len(items))))
            return items
        values: dict[str, Any] = {}
        while type(event := next(events)).__name__ != "MappingEndEvent":
            key = self._value(event, events, (*path, "[key]"))
            if not isinstance(key, str):
                self._refuse(event, f"{show(key)} is not a plain word, so not a key", "remove it")
            if key in values:
                first = self.marks[*path, key, "[key]"][0] + 1
                self._refuse(event, f"duplicate key '{key}'", f"it is already set in line {first}")
            values[key] = self._value(next(events), events, (*path, key))
            self.marks[*path, key, "[key]"] = event.start_mark.line, event.start_mark.column
        return values


def _plain(text: str) -> object:
    """What an unquoted word is: nothing, a truth value, a number, or text."""
    if text in _PLAIN:
        return _PLAIN[text]
    if re.fullmatch(r"[-+]?\d{1,18}", text, re.ASCII):
        return int(text)
    number = re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", text, re.ASCII | re.IGNORECASE)
    return float(text) if number else text


def _problems(error: ValidationError, marks: dict[Where, tuple[int, int]], source: str) -> list[Problem]:
    """Each pydantic error in plain words at its place, in file order, one per cause."""
    found: list[tuple[Where, str, str]] = []
    misspelt: set[Where] = set()
    # Unknown keys sort first: a misspelt key is one mistake, not an unknown key and a missing one.
    for detail in sorted(error.errors(include_url=False), key=lambda d: d["type"] != "extra_forbidden"):
        where, kind, given, context = detail["loc"], detail["type"], detail["input"], detail.get("ctx", {})
        if kind == "extra_forbidden":
            *parent, word = where
            known = known_keys(tuple(parent))
            misspelt |= {(*parent, key) for key in difflib.get_close_matches(str(word), known, 1)}
            noun = "action" if "rollback" in known else "key"
            found.append(((*where, "[key]"), f"unknown {noun} '{word}'", nearest(word, known)))
        elif kind == "missing":
            if where not in misspelt:
                found.append((where[:-1], f"missing key '{where[-1]}'", f"add `{where[-1]}: ...` here"))
        elif kind in ("enum", "literal_error"):
            words = re.findall(r"'([^']*)'", context["expected"])
            message = f"{show(given)} is not {'one of ' * (len(words) > 1)}{', '.join(words)}"
            found.append((where, message, nearest(given, words)))
        elif kind != "too_short" or not given:  # pydantic counts sound entries only: no second error for one
            message, suggestion = _MESSAGES.get(kind, ("{msg}", "see `foreshock policy schema`"))
            words_of = {"value": show(given), "msg": detail["msg"], **context}
            found.append((where, message.format(**words_of), suggestion.format(**words_of)))
    problems = []
    for where, message, suggestion in found:
        while where not in marks:
            where = where[:-1]
        line, column = marks[where]
        problems.append(Problem(source, line + 1, column + 1, message, suggestion))
    return sorted(problems, key=lambda p: (p.line, p.column))


def known_keys(path: Where) -> list[str]:
    """The keys that the models allow in the mapping at `path`."""
    kind: Any = PolicySet
    for step in path:
        if get_origin(kind) in (tuple, dict):
            kind = get_args(kind)[isinstance(step, str)]
        else:
            kind = next(f.annotation for name, f in kind.model_fields.items() if (f.alias or name) == step)
        if isinstance(kind, UnionType):
            kind = get_args(kind)[0]
    return [field.alias or name for name, field in kind.model_fields.items()]

"""From a policy file to a `PolicySet`, or to errors that name file, line, column and a way out.

YAML is read into plain nodes only: no tag is constructed, no anchor expanded, no key read twice. The nodes'
positions stay beside the values, so that an error of the models points at the words that caused it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn, get_args, get_origin

from pydantic import ValidationError

from foreshock.policies.models import PolicySet
from foreshock.policies.units import Where, nearest, show

SHIPPED = ("default", "unattended")
MAX_BYTES = 262_144
"""A policy larger than this is a mistake or an attack."""
_SCALARS = {
    "null": lambda text: None,
    "bool": lambda text: text.lower() == "true",
    "int": int,
    "float": float,
    "str": str,
    "timestamp": str,
}
_TAG = "tag:yaml.org,2002:"
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
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        problem = Problem(str(path), 0, 0, f"cannot be read: {reason}", f"give a file, or {' or '.join(SHIPPED)}")
        raise PolicyError([problem]) from None
    return loads(data, str(path))


def loads(text: str | bytes, source: str = "<string>") -> PolicySet:
    """The policy set in `text`; `source` is the file name that errors show. Raises `PolicyError`."""
    values, marks = _Reader(source).read(text)
    try:
        return PolicySet.model_validate(values)
    except ValidationError as error:
        raise PolicyError(_problems(error, marks, source)) from None


def shipped(name: str) -> PolicySet:
    """A policy set that comes with Foreshock: one of `SHIPPED`."""
    if name not in SHIPPED:
        raise PolicyError([Problem(name, 0, 0, "no such shipped policy", nearest(name, SHIPPED))])
    file = resources.files("foreshock.policies").joinpath("library", f"{name}.yaml")
    return loads(file.read_bytes(), f"{name}.yaml")


def resolve(name_or_path: str | Path) -> PolicySet:
    """A shipped name or a path. A file called like a shipped policy is reached as `./default`."""
    return shipped(str(name_or_path)) if str(name_or_path) in SHIPPED else load(name_or_path)


class _Reader:
    """YAML text to plain values and the position of each; refuses everything that is not plain."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.marks: dict[Where, tuple[int, int]] = {}

    def read(self, text: str | bytes) -> tuple[Any, dict[Where, tuple[int, int]]]:
        from ruamel.yaml import YAML
        from ruamel.yaml.error import MarkedYAMLError
        from ruamel.yaml.reader import ReaderError

        text = self._decode(text)
        try:
            node = YAML(typ="safe", pure=True).compose(text)
            if node is None:
                self._refuse(0, 0, "the file is empty", "begin with `apiVersion: foreshock/v1`")
            return self._value(node, ()), self.marks
        except RecursionError:
            self._refuse(0, 0, "nested too deeply", "a policy needs about ten levels")
        except ReaderError as error:
            before = text[: error.position]
            column = len(before) - before.rfind("\n") - 1
            self._refuse(before.count("\n"), column, "a character that YAML does not allow", "remove it")
        except MarkedYAMLError as error:
            mark, begun = error.problem_mark, error.context_mark
            if mark and (error.problem or "").startswith("but found another document"):
                self._refuse(mark.line, mark.column, "a second document", "one file holds one policy set")
            since = f" from line {begun.line + 1}" if begun else ""
            help = f"{error.context}{since}: check indentation, quotes and brackets"
            at = mark or begun
            self._refuse(at.line if at else 0, at.column if at else 0, f"not YAML: {error.problem}", help)

    def _refuse(self, line: int, column: int, message: str, suggestion: str) -> NoReturn:
        raise PolicyError([Problem(self.source, line + 1, column + 1, message, suggestion)])

    def _decode(self, text: str | bytes) -> str:
        if len(text) > MAX_BYTES:
            self._refuse(0, 0, f"larger than {MAX_BYTES} bytes", "a policy is a page, not a data set")
        try:
            text = text if isinstance(text, str) else text.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            before = bytes(error.object[: error.start])
            column = len(before) - before.rfind(b"\n") - 1
            self._refuse(before.count(b"\n"), column, "not UTF-8 text", "save the file as UTF-8")
        if tab := re.search(r"^ *\t+(?=\S)", text, re.MULTILINE):
            line = text.count("\n", 0, tab.start())
            self._refuse(line, tab.group().index("\t"), "a tab in the indentation", "indent with spaces")
        return text

    def _value(self, node: Any, path: Where) -> Any:
        at = node.start_mark.line, node.start_mark.column
        self.marks[path] = at
        kind = str(node.tag).removeprefix(_TAG)
        if node.anchor:
            self._refuse(*at, f"an anchor '&{node.anchor}'", "write the values out: policies have no aliases")
        if isinstance(node.value, str):
            if kind not in _SCALARS:
                self._refuse(*at, f"a tag '{node.tag}'", "remove it: policies hold plain values only")
            try:
                return _SCALARS[kind](node.value)
            except ValueError:
                return node.value
        if kind not in ("map", "seq"):
            self._refuse(*at, f"a tag '{node.tag}'", "remove it: policies hold plain values only")
        if kind == "seq":
            return [self._value(item, (*path, i)) for i, item in enumerate(node.value)]
        values: dict[str, Any] = {}
        for key_node, item in node.value:
            line, column = key_node.start_mark.line, key_node.start_mark.column
            key = self._value(key_node, (*path, "[key]"))
            if not isinstance(key, str) or key_node.tag != f"{_TAG}str":
                self._refuse(line, column, f"{show(key)} is not a plain word, so not a key", "quote or remove it")
            if key in values:
                first = self.marks[*path, key, "[key]"][0] + 1
                self._refuse(line, column, f"duplicate key '{key}'", f"it is already set in line {first}")
            values[key] = self._value(item, (*path, key))
            self.marks[*path, key, "[key]"] = line, column
        return values


def _problems(
    error: ValidationError, marks: dict[Where, tuple[int, int]], source: str
) -> list[Problem]:
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
        else:
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

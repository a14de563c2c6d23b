"""The small written values of a policy, and the one way in which a wrong value is reported.

First stop inside policies: YAML gives `"8 steps"`, these annotations hand typed values on to `models`.
A number without its unit is refused: `500` of what is the question that an incident asks at night.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

Where = tuple[int | str, ...]
"""A path inside the document; a last element `"[key]"` means the key itself, not its value."""


class Strict(BaseModel):
    """A frozen mapping that refuses unknown keys: the base of everything that a policy can say."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def show(value: object) -> str:
    """A value as an error message names it: short, and never a dump of a whole mapping."""
    if value is None or value in ("", [], {}, ()):
        return "an empty value"
    if isinstance(value, dict | list | tuple):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"'{text if len(text) <= 40 else text[:37] + '...'}'"


def nearest(word: object, known: Sequence[str]) -> str:
    """The suggestion for a word that is none of `known`."""
    close = difflib.get_close_matches(str(word), known, 1)
    return f"did you mean `{close[0]}`?" if close else f"known: {', '.join(known) or 'none'}"


def custom(problem: str, suggestion: str) -> PydanticCustomError:
    """One error in plain words, with the suggestion that the loader prints under it."""
    return PydanticCustomError("policy", "{problem}", {"problem": problem, "suggestion": suggestion})


def flaw(where: Where, problem: str, suggestion: str) -> InitErrorDetails:
    return InitErrorDetails(type=custom(problem, suggestion), loc=where, input=None)


def refuse(title: str, flaws: list[InitErrorDetails]) -> None:
    """Raise all `flaws` at once, each at its own place (paths relative to the model being validated)."""
    if flaws:
        raise ValidationError.from_exception_data(title, flaws)


@dataclass(frozen=True)
class Written:
    """Annotation of a value that is written as one short string: parsed strictly, dumped back as written."""

    what: str
    pattern: str
    build: Callable[..., Any]
    """From the pattern's groups to the value; may raise `custom`."""
    example: str
    write: Callable[[Any], object] = str
    """The inverse of `build`, up to `str`."""

    def parse(self, value: Any) -> Any:
        found = re.fullmatch(self.pattern, value, re.ASCII) if isinstance(value, str) else None
        if found is None:
            raise custom(f"{show(value)} is not {self.what}", f"write for example `{self.example}`")
        return self.build(*found.groups())

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        dump = core_schema.plain_serializer_function_ser_schema(
            lambda v: str(self.write(v)), when_used="json"
        )
        return core_schema.no_info_plain_validator_function(self.parse, serialization=dump)

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        pattern = f"^(?:{self.pattern})$".replace(r"\d", "[0-9]")
        return {"type": "string", "pattern": pattern, "description": f"{self.what}, e.g. {self.example}"}


def plural(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' * (n != 1)}"


@dataclass(frozen=True, slots=True)
class ForSamples:
    """Hold for `n` evaluations of the diagnosis."""

    n: int

    def __str__(self) -> str:
        return plural(self.n, "sample")


@dataclass(frozen=True, slots=True)
class ForSteps:
    """Hold for `n` training steps."""

    n: int

    def __str__(self) -> str:
        return plural(self.n, "step")


@dataclass(frozen=True, slots=True)
class InARow:
    """`n` consecutive samples."""

    n: int

    def __str__(self) -> str:
        return f"{self.n} in a row"


@dataclass(frozen=True, slots=True)
class NOf:
    """`k` of the last `n` samples, k <= n."""

    k: int
    n: int

    def __str__(self) -> str:
        return f"{self.k} of {self.n}"


@dataclass(frozen=True, slots=True)
class FalseAlarms:
    """At most `alarms` false alarms in `steps` steps, all streams together."""

    alarms: int
    steps: int

    @property
    def apart(self) -> float:
        """Steps between two false alarms on average, as the detectors take it."""
        return self.steps / self.alarms

    def __str__(self) -> str:
        return f"{self.alarms} per {plural(self.steps, 'step')}"


def _hold(n: str, unit: str) -> ForSamples | ForSteps:
    return (ForSamples if unit == "sample" else ForSteps)(int(n))


def _n_of(k: str, n: str) -> NOf:
    if int(k) > int(n):
        raise custom(f"'{k} of {n}' can never happen", f"the first number is the smaller: `{n} of {k}`")
    return NOf(int(k), int(n))


def _false_alarms(alarms: str, steps: str) -> FalseAlarms:
    return FalseAlarms(int(alarms), int(steps))


_N = r"([1-9]\d{0,8})"
_STEPS = Written("a number of steps with its unit", r"(\d{1,9}) steps?", int, "8 steps", ForSteps)
_POSITIVE = Written("a positive number of steps with its unit", f"{_N} steps?", int, "8 steps", ForSteps)
_HOLD = Written("a number of samples or steps", f"{_N} (sample|step)s?", _hold, "3 samples` or `5 steps")
_SIGMA = Written(
    "a width in sigma", r"((?=.*[1-9])\d{1,2}(?:\.\d{1,3})?) sigma", float, "3 sigma", "{:g} sigma".format
)
_ROW = Written("a number of samples in a row", f"{_N} in a row", lambda n: InARow(int(n)), "5 in a row")
_SHARE = Written("a share of the last samples", f"{_N} of {_N}", _n_of, "3 of 8")
_ALARMS = Written("a budget of false alarms", f"{_N} per {_N} steps?", _false_alarms, "1 per 100000 steps")
_NAME = Written("a name in lower case", "([a-z][a-z0-9]*(?:[-_][a-z0-9]+)*)", str, "non-finite")
_ENV = Written("the name of an environment variable", "([A-Z_][A-Z0-9_]*)", str, "FORESHOCK_ONCALL")

Steps = Annotated[int, _STEPS]
PositiveSteps = Annotated[int, _POSITIVE]
Hold = Annotated[ForSamples | ForSteps, _HOLD]
Sigma = Annotated[float, _SIGMA]
Row = Annotated[InARow, _ROW]
Share = Annotated[NOf, _SHARE]
AlarmBudget = Annotated[FalseAlarms, _ALARMS]
Name = Annotated[str, _NAME]
EnvName = Annotated[str, _ENV]


def word_or_names(*words: str, noun: str) -> tuple[PlainValidator, PlainSerializer, WithJsonSchema]:
    """Annotations of a value that is one of `words`, or a list of names. `noun` says what is named."""

    def parse(value: Any) -> Any:
        if isinstance(value, str) and value in words:
            return value
        if isinstance(value, list | tuple) and value and all(isinstance(v, str) and v for v in value):
            return tuple(value)
        raise custom(f"{show(value)} is not {' or '.join(words)} or a list of {noun}", f"write `{words[0]}`")

    names = {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}}
    schema = {"anyOf": [{"enum": list(words)}, names]}
    return PlainValidator(parse), PlainSerializer(lambda value: value), WithJsonSchema(schema)

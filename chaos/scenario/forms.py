"""Types of scenario fields that may be written in several forms: a time in seconds or as a text,
and a value or a mapping. The models read them, so that nothing is rewritten before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
)
from pydantic_core import CoreSchema, PydanticCustomError
from pydantic_core.core_schema import no_info_wrap_validator_function

from trainchaos.chaos.scenario.sla import nearest, parse_duration

SECONDS_TEXT = {"type": "string", "pattern": r"^\s*[0-9.]+(e[-+]?[0-9]+)?\s*(us|ms|s|m|min|h)\s*$"}
"""JSON Schema of a time as a text."""


class _OrText:
    """In the JSON Schema: the number, or a text such as 30s."""

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"anyOf": [handler(core), SECONDS_TEXT]}


def in_seconds(value: Any) -> Any:
    """Seconds of a number or a text; anything else as it is. Raises ClauseError."""
    plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    return parse_duration(value) if plain else value


Seconds = Annotated[float, Field(ge=0), BeforeValidator(in_seconds), _OrText()]
"""Seconds, or a text such as 2.5s."""
SomeSeconds = Annotated[float, Field(gt=0), BeforeValidator(in_seconds), _OrText()]
"""More than none."""


def readable(parse: Callable[[str], Any]) -> AfterValidator:
    """Of a text that ``parse`` can read; its ValueError says what is wrong."""

    def check(text: str) -> str:
        parse(text)
        return text

    return AfterValidator(check)


class Form:
    """Of a field with several forms. ``words``: what to write, in one sentence instead of one
    complaint per form; ``models``: by the key that tells them; ``plain``: reads all else.
    """

    def __init__(
        self, words: str, plain: Callable[[Any], Any] | None = None, **models: type[BaseModel]
    ) -> None:
        self._words, self._plain, self._models = words, plain, models

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return no_info_wrap_validator_function(self._read, handler(source))

    def _read(self, value: Any, inner: ValidatorFunctionWrapHandler) -> Any:
        mapping = isinstance(value, dict)
        for key in value if mapping else ():
            if key in self._models:
                return self._models[key].model_validate(value, strict=True)
        if value is not None and self._plain is not None:
            value = self._plain(value)
        try:
            return inner(value)
        except ValidationError:
            near = [nearest(str(key), list(self._models)) for key in (value if mapping else ())]
            if any(near):
                model = self._models[next(filter(None, near))]
                return model.model_validate(value, strict=True)
            raise PydanticCustomError("form", self._words) from None  # type: ignore[arg-type]

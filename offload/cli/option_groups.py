"""Options of a command in groups: each a frozen dataclass, whose fields typer sees as parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints

__all__ = ["grouped"]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """`command` for typer: a parameter that is annotated with a dataclass is replaced by the fields of that, in their order.

    Fields are annotated as typer wants parameters, ``Annotated[int, typer.Option(...)]``; their defaults are the options'.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        if is_dataclass(hints[name]):
            groups[name] = hints[name]
            parameters += _fields_of(hints[name])
        else:
            parameters.append(_keyword(name, hints[name], parameter.default))

    @functools.wraps(command)
    def flat(**values: Any) -> None:
        made = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**made, **values)

    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return flat


def _fields_of(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [_keyword(field.name, hints[field.name], field.default) for field in fields(group)]


def _keyword(name: str, hint: Any, default: Any) -> inspect.Parameter:
    """Without a default where there is none: dataclasses and signatures have their own words for that."""
    if default is MISSING:
        default = inspect.Parameter.empty
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)

"""The JSON Schema of a report, made from its dataclasses.

``sgl_piecewise/data/compare.schema.json`` is what `schema_text` returned for this version; a test keeps the
two equal, so a change of layout shows in review and asks for a new version.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from typing import Any

from .report import SCHEMA, ComparisonReport

_SCALARS = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


def schema_text() -> str:
    """Returns the schema as it ships."""
    return json.dumps(report_schema(), indent=1) + "\n"


def report_schema() -> dict[str, Any]:
    """Returns the JSON Schema (2020-12) of `ComparisonReport`."""
    definitions: dict[str, Any] = {}
    reference = _schema_of(ComparisonReport, definitions)
    definitions[ComparisonReport.__name__]["properties"]["schema"] = {"const": SCHEMA}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": SCHEMA,
        **reference,
        "$defs": dict(sorted(definitions.items())),
    }


def _schema_of(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of a type; dataclasses go into ``definitions``."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return {}
    if kind in _SCALARS:
        return {"type": _SCALARS[kind]}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema_of(argument, definitions) for argument in arguments]}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema_of(arguments[1], definitions)}
    if origin is tuple and arguments[-1] is Ellipsis:
        return {"type": "array", "items": _schema_of(arguments[0], definitions)}
    assert isinstance(kind, type), f"no schema for {kind}"
    assert dataclasses.is_dataclass(kind), f"no schema for {kind}"
    name = str(kind.__name__)
    if name not in definitions:
        hints = typing.get_type_hints(kind)
        fields = dataclasses.fields(kind)
        definitions[name] = {}  # before its fields, so that their definitions come after it
        definitions[name] = {
            "description": (kind.__doc__ or "").splitlines()[0],
            "type": "object",
            "properties": {field.name: _schema_of(hints[field.name], definitions) for field in fields},
            "required": [field.name for field in fields],
        }
    return {"$ref": f"#/$defs/{name}"}

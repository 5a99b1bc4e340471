"""The JSON Schema (draft 2020-12) of a scenario file, for completion, hover texts and error marks
in editors.

The schema is looser than ``chaos validate``, which also checks combinations; whatever it rejects is
wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel

from trainchaos.chaos.scenario.catalogue import Catalogue
from trainchaos.chaos.scenario.forms import SECONDS_TEXT
from trainchaos.chaos.scenario.model import Scenario
from trainchaos.chaos.scenario.sla import AGGREGATES
from trainchaos.chaos.scenario.steady import MEASURES

Json = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_REFERENCE: Json = {
    "type": "string",
    "pattern": r"\$\{",
    "description": "${matrix.x}, ${vars.x}, ${env:X:-default}",
}
# Keys whose values must be literal, never references.
_LITERAL = frozenset({"version", "name", "matrix"})


def scenario_schema(catalogue: Catalogue) -> Json:
    """The schema of a scenario file in which these plugins, metrics and checkers may be named."""
    schema = Scenario.model_json_schema()
    defs: Json = schema["$defs"]
    defs["Reference"] = _REFERENCE
    fault = defs["FaultSpec"]
    _choose(fault, "kind", catalogue.faults, defs)
    _choose(defs["WorkloadSpec"], "kind", catalogue.workloads, defs)
    _choose(defs["LauncherSpec"], "kind", catalogue.launchers, defs)
    defs["RecoverySpec"] = _recovery(catalogue.strategies, defs)
    launcher = defs["LauncherSpec"]
    _command(schema, defs["WorkloadSpec"])
    defs["LauncherSpec"] = {"anyOf": [{"enum": sorted(catalogue.launchers)}, launcher]}
    defs["SlaCheck"] = {"anyOf": [_clause(), {**defs["SlaCheck"]}]}
    fault["properties"]["duration"]["anyOf"].append(SECONDS_TEXT)
    defs["SteadyCheck"] = {"anyOf": [_steady(), defs["SteadyCheck"]]}
    properties = schema["properties"]
    properties["sla"]["propertyNames"] = {"enum": sorted(catalogue.metrics)}
    properties["invariants"]["anyOf"] = [
        {"enum": ["default", "observable"]},
        _list_of(sorted(catalogue.checkers)),
        _leave_out(sorted(catalogue.checkers)),
    ]
    properties["matrix"] = _matrix()
    _extending(schema)
    for name, definition in defs.items():
        if name != "Reference":
            _admit_references(definition)
    _admit_references(schema)
    return {
        "$schema": DIALECT,
        "title": "Chaos scenario",
        **{k: v for k, v in schema.items() if k != "title"},
    }


def _choose(schema: Json, key: str, kinds: Mapping[str, type[BaseModel]], defs: Json) -> None:
    """Name the kinds under ``key``, and check ``params`` by the kind named."""
    schema["properties"][key] = {"enum": sorted(kinds), "description": _summary(kinds)}
    schema["allOf"] = [
        {"if": _is(key, name), "then": {"properties": {"params": _params(name, model, defs)}}}
        for name, model in sorted(kinds.items())
    ]


def _recovery(strategies: Mapping[str, type[BaseModel]], defs: Json) -> Json:
    """A bare name, or the name with parameters beside it or under ``params``."""
    names = {"enum": sorted(strategies), "description": _summary(strategies)}
    branches = []
    for name, model in sorted(strategies.items()):
        params = _params(name, model, defs)
        beside = {"strategy": True, "params": params, **params.get("properties", {})}
        branches.append(
            {
                "if": _is("strategy", name),
                "then": {"properties": beside, "additionalProperties": False},
            }
        )
    # without a strategy: keeps the strategy of the extended scenario
    whole = {"type": "object", "properties": {"strategy": names}, "allOf": branches}
    return {"anyOf": [names, whole]}


def _is(key: str, name: str) -> Json:
    return {"properties": {key: {"const": name}}, "required": [key]}


def _params(name: str, model: type[BaseModel], defs: Json) -> Json:
    """The parameters of one plugin, its own definitions moved into ``defs``."""
    schema = model.model_json_schema(ref_template=f"#/$defs/{name}.{{model}}")
    for inner, definition in schema.pop("$defs", {}).items():
        defs[f"{name}.{inner}"] = definition
    for field, definition in schema.get("properties", {}).items():
        if field.endswith("_s"):
            schema["properties"][field] = {
                **_texts(definition),
                "anyOf": [_bare(definition), SECONDS_TEXT],
            }
    return schema


def _clause() -> Json:
    return {
        "type": "string",
        "pattern": rf"^\s*({'|'.join(AGGREGATES)})\s*(<=|>=|==|<|>)|\$\{{",
        "examples": ["median < 40 steps", "max < 5s", "median >= 0.80"],
    }


def _list_of(names: Iterable[str]) -> Json:
    return {"type": "array", "items": {"enum": list(names)}}


def _command(schema: Json, workload: Json) -> None:
    """A workload is a kind or a command; only the first needs a recovery."""
    workload["oneOf"] = [{"required": ["kind"]}, {"required": ["command"]}]
    schema["required"] = [name for name in schema["required"] if name != "recovery"]


def _leave_out(names: Iterable[str]) -> Json:
    inside = {"leave_out": {**_list_of(names), "minItems": 1}}
    return {
        "type": "object",
        "required": ["leave_out"],
        "properties": inside,
        "additionalProperties": False,
    }


def _steady() -> Json:
    return {"type": "string", "pattern": rf"^\s*({'|'.join(MEASURES)})\s*(<=|>=|==|<|>)|\$\{{"}


def _extending(schema: Json) -> None:
    """A scenario that extends another may omit any key, and remove an inherited value with null."""
    extends = {"required": ["extends"]}
    schema["if"], schema["else"] = extends, {"required": schema.pop("required", [])}
    for name, definition in schema["properties"].items():
        if name not in _LITERAL | {"extends"}:
            schema["properties"][name] = {
                **_texts(definition),
                "anyOf": [_bare(definition), {"type": "null"}],
            }
    sla = schema["properties"]["sla"]["anyOf"][0]
    sla["additionalProperties"] = {"anyOf": [sla["additionalProperties"], {"type": "null"}]}


def _matrix() -> Json:
    entries = {"type": "array", "items": {"type": "object"}}
    return {
        "type": "object",
        "description": (
            "axes (name: list of values) whose product gives the cells; use ${matrix.name}"
        ),
        "properties": {"include": entries, "exclude": entries},
        "additionalProperties": {"type": "array", "minItems": 1},
    }


def _admit_references(schema: Any) -> None:
    """Let every value, except the literal ones, be a ``${...}`` instead."""
    if isinstance(schema, list):
        for each in schema:
            _admit_references(each)
    if not isinstance(schema, dict):
        return
    for name, child in list(schema.items()):
        if name == "if":
            continue
        _admit_references(child)
        if name == "properties":
            schema[name] = {
                key: value if key in _LITERAL else _or_reference(value)
                for key, value in child.items()
            }
        elif name == "items" and isinstance(child, dict):
            schema[name] = _or_reference(child)


def _or_reference(schema: Any) -> Any:
    if schema is True:
        return schema
    return {**_texts(schema), "anyOf": [_bare(schema), {"$ref": "#/$defs/Reference"}]}


def _texts(schema: Mapping[str, Any]) -> Json:
    """Texts shown by an editor, which must stay at the top level, not inside an alternative."""
    return {key: schema[key] for key in ("description", "default", "title") if key in schema}


def _bare(schema: Mapping[str, Any]) -> Json:
    return {
        key: value
        for key, value in schema.items()
        if key not in ("description", "default", "title")
    }


def _summary(kinds: Mapping[str, type[BaseModel]]) -> str:
    documented = (
        (name, (model.__doc__ or "").strip().split("\n", 1)[0])
        for name, model in sorted(kinds.items())
    )
    return "; ".join(f"{name}: {line}" for name, line in documented if line)

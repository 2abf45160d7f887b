"""Fifty JSON schemas of growing complexity, each with something finite to say often enough to be simulated."""

from typing import Any


def _object(**properties: Any) -> dict[str, Any]:
    """An object with exactly these properties, all required."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _array(items: Any, least: int, most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _text(most: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": most}


def _whole(least: int, most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most}


_CODE = {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}
_POINT = _object(x=_whole(-9, 9), y=_whole(-9, 9))
_PERSON = _object(
    name=_text(12), age=_whole(0, 120), mail={"type": "string", "format": "email", "maxLength": 30}
)

SCHEMAS: dict[str, Any] = {
    "const": {"const": "yes"},
    "const_number": {"const": 42},
    "const_object": {"const": {"a": [1, 2, {"b": None}]}},
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "enum": {"enum": ["red", "green", "blue"]},
    "mixed_enum": {"enum": ["one", 2, None, True, [3]]},
    "small_integer": _whole(0, 9),
    "signed_integer": _whole(-128, 127),
    "exclusive_integer": {"type": "integer", "exclusiveMinimum": 10, "exclusiveMaximum": 13},
    "multiple": {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 5},
    "number": {"type": "number", "minimum": 0, "maximum": 1},
    "string": _text(10),
    "string_bounds": {"type": "string", "minLength": 3, "maxLength": 5},
    "pattern": _CODE,
    "pattern_words": {"type": "string", "pattern": "^(the|a) (cat|dog)( sat)?$"},
    "unicode_const": {"const": "世界 😀 é"},
    "unicode_pattern": {"type": "string", "pattern": "^[α-ω]{2,4}$"},
    "escapes": {"const": 'a "quoted" \\ back\nslash\t'},
    "control_token_text": {"const": "<|im_end|></s>"},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time", "maxLength": 20},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "array": _array({"type": "boolean"}, 0, 3),
    "fixed_array": _array(_whole(0, 9), 3, 3),
    "tuple": {
        "type": "array",
        "prefixItems": [_whole(0, 9), {"type": "boolean"}],
        "items": False,
        "minItems": 2,
    },
    "array_of_arrays": _array(_array(_whole(0, 9), 1, 2), 1, 2),
    "empty_object": _object(),
    "object": _object(a=_whole(0, 99)),
    "object_of_kinds": _object(a=_whole(0, 99), b=_text(5), c={"type": "boolean"}, d={"type": "null"}),
    "optional": {
        "type": "object",
        "properties": {"a": _whole(0, 9), "b": _whole(0, 9), "c": _whole(0, 9)},
        "required": ["b"],
        "additionalProperties": False,
    },
    "unicode_keys": _object(**{"名前": _text(4), "größe": _whole(0, 9), "a b": {"const": "ß"}}),
    "nested": _object(a=_object(b=_object(c=_object(d={"enum": ["deep"]})))),
    "point": _POINT,
    "points": _array(_POINT, 1, 3),
    "person": _PERSON,
    "map": {"type": "object", "additionalProperties": _whole(0, 9), "maxProperties": 2},
    "pattern_keys": {
        "type": "object",
        "patternProperties": {"^k[0-9]$": {"type": "boolean"}},
        "additionalProperties": False,
        "maxProperties": 1,
    },
    "type_union": {"type": ["integer", "boolean", "null"], "minimum": 0, "maximum": 99},
    "any_of": {"anyOf": [_whole(0, 9), {"const": "none"}, _array({"type": "null"}, 1, 1)]},
    "one_of": {"oneOf": [{"type": "boolean"}, _whole(0, 9)]},
    "all_of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 7}]},
    "tagged_union": {
        "anyOf": [
            _object(kind={"const": "circle"}, radius=_whole(1, 9)),
            _object(kind={"const": "box"}, width=_whole(1, 9), height=_whole(1, 9)),
        ]
    },
    "reference": {
        "$defs": {"code": _CODE},
        **_object(first={"$ref": "#/$defs/code"}, second={"$ref": "#/$defs/code"}),
    },
    "tree": {
        "$defs": {
            "node": _object(
                value=_whole(0, 9), left={"$ref": "#/$defs/next"}, right={"$ref": "#/$defs/next"}
            ),
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
        },
        "$ref": "#/$defs/node",
    },
    "list": {
        "$defs": {
            "cell": _object(head=_whole(0, 9), tail={"anyOf": [{"$ref": "#/$defs/cell"}, {"type": "null"}]})
        },
        "$ref": "#/$defs/cell",
    },
    "tool_call": _object(
        name={"enum": ["search", "fetch"]},
        arguments={
            "anyOf": [
                _object(query=_text(20), limit=_whole(1, 10)),
                _object(place={"type": "string", "pattern": "^https://[a-z]{1,8}\\.(org|com)/$"}),
            ]
        },
    ),
    "order": _object(
        id={"type": "string", "format": "uuid"},
        customer=_PERSON,
        lines=_array(_object(code=_CODE, count=_whole(1, 99), price={"type": "number", "minimum": 0}), 1, 3),
        paid={"type": "boolean"},
        note={"anyOf": [_text(20), {"type": "null"}]},
    ),
    "survey": {
        "$defs": {
            "answer": {"anyOf": [{"type": "boolean"}, _whole(1, 5), _text(8)]},
            "block": _object(title=_text(8), answers=_array({"$ref": "#/$defs/answer"}, 1, 3)),
        },
        **_object(
            language={"enum": ["de", "en", "日本語"]},
            blocks=_array({"$ref": "#/$defs/block"}, 1, 2),
            total={"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": 10},
            final={"const": True},
        ),
    },
}

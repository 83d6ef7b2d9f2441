"""Records <-> plain JSON values, driven by the records' own type annotations.

A dataclass becomes an object of its fields; fields equal to their default are left out. A tuple
becomes an array. In a union, a dataclass carries its class name: {"View": {...}}. Numbers that JSON
lacks are written {"float": "-inf"}. A codec is built once per type and kept.
"""

import dataclasses
import hashlib
import json
import math
import types
import typing
from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
Convert = Callable[[Any], Any]

NONE_TYPE = type(None)
# Fields by their names in files of before, and what they are called now.
RENAMED = {
    "is_stretched": "is_dilated",
    "wishes": "constraints",
    "slot": "microbatch",
    "slots": "microbatches",
    "by_slots": "by_microbatches",
    "max_slots": "max_microbatches",
}


class Undecodable(ValueError):
    """A JSON value that does not fit the annotated type."""


def encode(record: Any) -> Any:
    """A record as plain JSON values."""
    tp: Any = type(record)
    return _encoder(tp)(record)


def decode(cls: type[T], plain: Any) -> T:
    """The record of type `cls` that `encode` turned into `plain`."""
    try:
        tp: Any = cls
        return typing.cast(T, _decoder(tp)(plain))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise Undecodable(f"{cls.__name__}: {error!r}") from error


def body_of(record: Any) -> bytes:
    """A record as one line of JSON: what its file holds."""
    return json.dumps(encode(record), separators=(",", ":"), allow_nan=False).encode()


def digest(record: Any) -> str:
    """A name for a record's contents: equal records, equal digests."""
    return hashlib.sha256(body_of(record)).hexdigest()


def _is_union(tp: Any) -> bool:
    return get_origin(tp) in (Union, types.UnionType)


@cache
def _encoder(tp: Any) -> Convert:
    if dataclasses.is_dataclass(tp):
        return _encode_dataclass(typing.cast(type, tp))
    if _is_union(tp):
        return _encode_any
    if get_origin(tp) is tuple:
        items = get_args(tp)
        if len(items) == 2 and items[1] is Ellipsis:
            each = _encoder(items[0])
            return lambda value: [each(x) for x in value]
        parts = [_encoder(item) for item in items]
        return lambda value: [f(x) for f, x in zip(parts, value, strict=True)]
    if tp is float:
        return _encode_float
    if isinstance(tp, type) and issubclass(tp, Enum):
        return lambda value: value.value
    return lambda value: value


def _encode_float(value: float) -> Any:
    return value if math.isfinite(value) else {"float": repr(value)}


def _encode_any(value: Any) -> Any:
    """Inside a union: by the value's own type, dataclasses tagged with their name."""
    if dataclasses.is_dataclass(value):
        tp: Any = type(value)
        return {tp.__name__: _encoder(tp)(value)}
    if isinstance(value, tuple):
        return [_encode_any(x) for x in value]
    if isinstance(value, float):
        return _encode_float(value)
    return value


def _encode_dataclass(cls: type) -> Convert:
    hints = get_type_hints(cls)
    fields = [(f.name, f.default, _encoder(hints[f.name])) for f in dataclasses.fields(cls)]

    def call(record: Any) -> dict[str, Any]:
        plain = {}
        for name, default, convert in fields:
            value = getattr(record, name)
            if default is dataclasses.MISSING or value != default:
                plain[name] = convert(value)
        return plain

    return call


@cache
def _decoder(tp: Any) -> Convert:
    if dataclasses.is_dataclass(tp):
        return _decode_dataclass(typing.cast(type, tp))
    if _is_union(tp):
        return _decode_union(tp)
    if get_origin(tp) is tuple:
        items = get_args(tp)
        if len(items) == 2 and items[1] is Ellipsis:
            each = _decoder(items[0])
            return lambda plain: tuple(each(x) for x in _need(list, plain))
        parts = [_decoder(item) for item in items]
        return lambda plain: tuple(f(x) for f, x in zip(parts, _need(list, plain), strict=True))
    if tp is float:
        return _decode_float
    if isinstance(tp, type) and issubclass(tp, Enum):
        return tp
    if tp in (int, str, bool):
        return lambda plain: _need(tp, plain)
    raise TypeError(f"no codec for {tp!r}")


def _need(tp: type, plain: Any) -> Any:
    if type(plain) is not tp:
        raise TypeError(f"{tp.__name__} expected, {type(plain).__name__} found")
    return plain


def _decode_float(plain: Any) -> float:
    if isinstance(plain, dict):
        return float(plain["float"])
    if type(plain) not in (int, float):
        raise TypeError(f"number expected, {type(plain).__name__} found")
    return float(plain)


def _decode_dataclass(cls: type) -> Convert:
    hints = get_type_hints(cls)
    fields = {f.name: _decoder(hints[f.name]) for f in dataclasses.fields(cls)}
    old = {before: now for before, now in RENAMED.items() if now in fields and before not in fields}

    def call(plain: Any) -> Any:
        named = ((old.get(name, name), value) for name, value in _need(dict, plain).items())
        return cls(**{name: fields[name](value) for name, value in named})

    return call


def _decode_union(tp: Any) -> Convert:
    """A tuple among the options is one of the union's own kind: unions are nested, or hold none."""
    options = get_args(tp)
    kinds: list[Any] = [option for option in options if dataclasses.is_dataclass(option)]
    records = {kind.__name__: _decoder(kind) for kind in kinds}
    is_nested = any(get_origin(o) is tuple for o in options)
    plain_types = tuple(o for o in options if o in (bool, int, float, str, NONE_TYPE))

    def call(plain: Any) -> Any:
        if isinstance(plain, dict):
            (tag, body), *rest = plain.items()
            if rest:
                raise TypeError("one tag expected")
            return _decode_float(plain) if tag == "float" and float in options else records[tag](body)
        if isinstance(plain, list) and is_nested:
            return tuple(map(call, plain))
        if type(plain) is int and int not in plain_types and float in plain_types:
            return float(plain)
        if type(plain) not in plain_types:
            raise TypeError(f"{type(plain).__name__} found where {tp} is expected")
        return plain

    return call

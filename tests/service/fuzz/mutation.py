"""Inputs that are almost right: protobuf messages with some of their parts made wrong."""

from __future__ import annotations

import random
import struct
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

_INTEGERS = (0, 1, 2, 3, 7, 127, 128, 255, 2**15, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1)
_DOUBLES = (0.0, -0.0, 1.0, -1.0, 1e-320, 1e308, float("inf"), float("-inf"), float("nan"))
_STRINGS = (
    "",
    "a",
    "0",
    "..",
    "a" * 129,
    "a/b\n",
    "\0",
    "ü" * 40,
    "host:0",
    "127.0.0.1:9000",
    "x" * 4096,
)

_LIMITS = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
}

_EMPTY: dict[int, Any] = {
    FieldDescriptor.TYPE_STRING: "",
    FieldDescriptor.TYPE_BYTES: b"",
    FieldDescriptor.TYPE_DOUBLE: 0.0,
}


def random_bytes(rng: random.Random, longest: int = 200) -> bytes:
    """Any bytes, short ones more often."""
    return rng.randbytes(rng.choice((0, 1, 4, rng.randrange(16), rng.randrange(longest + 1))))


def mutated_bytes(raw: bytes, rng: random.Random) -> bytes:
    """``raw`` with something turned, cut off, put in, repeated or put at its end."""
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(6):
            case 0 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1 if data:
                data[at % len(data)] = rng.randrange(256)
            case 2:
                del data[at:]
            case 3:
                data[at:at] = random_bytes(rng, 32)
            case 4:
                data[at:at] = data[at : at + rng.randrange(64)]
            case _:
                data += random_bytes(rng, 64)
    return bytes(data)


def mutated(message: Message, rng: random.Random) -> Message:
    """A copy of ``message`` with one to three fields, at any depth, made wrong."""
    copy = type(message)()
    copy.CopyFrom(message)
    for _ in range(rng.choice((1, 1, 2, 3))):
        _mutate_one(copy, rng)
    return copy


def mutated_raw(message: Message, rng: random.Random) -> bytes:
    """Bytes of a message that is wrong in its fields, in its encoding, or in all."""
    choice = rng.randrange(10)
    if choice == 0:
        return random_bytes(rng)
    if choice <= 3:
        return mutated_bytes(message.SerializeToString(), rng)
    return mutated(message, rng).SerializeToString()


def parsed(kind: type[Message], raw: bytes) -> Any:
    """The message in ``raw``, or None if it is none."""
    try:
        return kind.FromString(raw)
    except DecodeError:
        return None


def _mutate_one(message: Message, rng: random.Random) -> None:
    while message.DESCRIPTOR.fields:
        field: Any = rng.choice(message.DESCRIPTOR.fields)
        if field.type != FieldDescriptor.TYPE_MESSAGE or rng.random() < 0.1:
            _mutate_field(message, field, rng)
            return
        if field.is_repeated:
            children = getattr(message, field.name)
            if not children:
                children.add()
                return
            message = rng.choice(children)
        else:
            message = getattr(message, field.name)


def _mutate_field(message: Message, field: FieldDescriptor, rng: random.Random) -> None:
    if field.is_repeated:
        _mutate_repeated(message, field, rng)
    elif field.type == FieldDescriptor.TYPE_MESSAGE or rng.random() < 0.1:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, _value(field, getattr(message, field.name), rng))


def _mutate_repeated(message: Message, field: FieldDescriptor, rng: random.Random) -> None:
    values = getattr(message, field.name)
    match rng.randrange(4):
        case 0:
            message.ClearField(field.name)
        case 1 if values:
            del values[rng.randrange(len(values))]
        case 2 if values and field.type != FieldDescriptor.TYPE_MESSAGE:
            at = rng.randrange(len(values))
            values[at] = _value(field, values[at], rng)
        case _ if field.type == FieldDescriptor.TYPE_MESSAGE:
            child = values.add()
            if len(values) > 1:
                child.CopyFrom(values[0])
        case _:
            values.append(_value(field, values[-1] if values else _EMPTY.get(field.type, 0), rng))


def _value(field: FieldDescriptor, old: Any, rng: random.Random) -> Any:
    match field.type:
        case FieldDescriptor.TYPE_STRING:
            return rng.choice(_STRINGS) if rng.random() < 0.7 else old + rng.choice(_STRINGS)
        case FieldDescriptor.TYPE_BYTES:
            return _column(old, rng)
        case FieldDescriptor.TYPE_BOOL:
            return not old
        case FieldDescriptor.TYPE_DOUBLE:
            return rng.choice(_DOUBLES) if rng.random() < 0.8 else old * rng.choice((-1, 2, 1e-9))
        case FieldDescriptor.TYPE_ENUM:
            return rng.choice((0, 1, 2, 3, 4, 77))
        case kind:
            low, high = _LIMITS[kind]
            wanted = rng.choice((old + 1, old - 1, -1, low, high, *_INTEGERS))
            return min(max(wanted, low), high)


def _column(old: bytes, rng: random.Random) -> bytes:
    """A packed column with a value changed, cut short, made longer, or any bytes."""
    choice = rng.randrange(5)
    if choice <= 2 and len(old) >= 4:
        at = rng.randrange(len(old) // 4) * 4
        value = rng.choice((-1, 0, 1, 2, 3, 2**31 - 1, -(2**31), rng.randrange(2**16)))
        return old[:at] + struct.pack("<i", value) + old[at + 4 :]
    if choice == 3 and old:
        return old[: rng.randrange(len(old))]
    return mutated_bytes(old, rng) if rng.random() < 0.5 else old + old[:8]

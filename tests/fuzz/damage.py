"""Damages files as their form has it: fields and cells rather than bytes, so that damage reaches what reads them.

A damaged file is a function of the file and of a random generator alone.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
import struct
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from echograph.ir.files import fields, with_checksum

NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 3, 7, 255, 1.5, -0.5, 1e-300, 1e300, -1e300, math.inf, -math.inf, math.nan, 2**16, 2**31 - 1,
    2**31, 2**32 - 1, 2**45, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30, -(2**63), -(2**63) - 1,
)  # fmt: skip
EXTREMES = tuple(n for n in NUMBERS if isinstance(n, int) and n >= 0)
TEXTS = (
    "", " ", "x" * 5000, "\0", "a\0b", "\ud800", "\x1b[31mred", "\x9b2J", "\r", "\n", "a\r\nb", "\u202e",
    "nan", "-1", "1e999", "true", "../../x", "/etc/passwd", "%s{}{0}", '"', "'", "[", "<b>", "é", "0", "9" * 400,
)  # fmt: skip
DEEP = "nested without end"
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], [{}], {"a": []}, [1, "a", None], DEEP)
TOKEN = re.compile(r'"[^"\n]*"|[\w.+-]+|\s+|.', re.DOTALL)
TOKENS = (
    "", "[", "]", "{", "}", "(", ")", "=", ",", ":", "#", "\n", "\r", "\0", "\ufeff", '"', '""', "-", "nan", "inf",
    "-inf", "true", "None", "-1", "1.5", "1e999", "99999999999999999999", "9223372036854775807",
    "9223372036854775808", "x" * 3000,
    "%0", "@0", "@99999", "[[", "\x1b[31m", "[" * 3000, "9" * 5000, "0x7f", "1_000", "é",
)  # fmt: skip


def damage(name: str, data: bytes, chance: Random) -> bytes:
    """The bytes of a file with damage, most often to what it says, and at times to its bytes."""
    if name.endswith(".gz") and chance.random() < 0.9:
        return gzip.compress(damage(name.removesuffix(".gz"), gzip.decompress(data), chance), 1, mtime=0)
    form = FORMS.get(name.rpartition(".")[2])
    if form is None or chance.random() < 0.2:
        return _again(name, damage_bytes(data, chance))
    return form(data, chance)


def damage_bytes(data: bytes, chance: Random) -> bytes:
    """Flips, replaces, inserts, removes, repeats or cuts bytes."""
    damaged = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        at, length = chance.randrange(len(damaged) or 1), chance.choice((1, 2, 8, 40))
        match chance.randrange(6):
            case 0 if damaged:
                damaged[at] ^= 1 << chance.randrange(8)
            case 1 if damaged:
                damaged[at] = chance.choice((0x00, 0x0D, 0x22, 0x7F, 0x80, 0xFF))
            case 2:
                damaged[at:at] = chance.randbytes(length)
            case 3 if len(damaged) > 2 * length:
                del damaged[at : at + length]
            case 4:
                damaged[at:at] = damaged[at : at + length]
            case _:
                del damaged[max(1, at) :]
    return bytes(damaged)


def _again(name: str, data: bytes) -> bytes:
    """A file of echograph's whose checksum vouches for the damage, half the time."""
    return b"".join(with_checksum([data[:-6]])) if name.endswith(".pb") and len(data) % 2 else data


# -- JSON, and pickles of plain values -----------------------------------------------------------------------


def damage_json(data: bytes, chance: Random) -> bytes:
    """Changes, drops, repeats, renames or retypes what a JSON document holds."""
    return _json(damage_tree(json.loads(data), chance))


def damage_lines(data: bytes, chance: Random) -> bytes:
    """Changes lines of JSON, one or a few, or their order."""
    lines: list[Any] = [json.loads(line) for line in data.splitlines()]
    if chance.random() < 0.15:
        _damage_list(lines, chance)
    else:
        at = chance.randrange(len(lines))
        lines[at] = damage_tree(lines[at], chance)
    return b"".join(_json(line) + b"\n" for line in lines)


def _json(value: Any) -> bytes:
    text = json.dumps(value, separators=(",", ":"))
    return text.replace(f'"{DEEP}"', "[" * 50_000 + "]" * 50_000).encode()


def damage_tree(value: Any, chance: Random) -> Any:
    """A tree of dictionaries and lists with damage in one to three places."""
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        places = list(_places(value))
        if not places or chance.random() < 0.02:
            return other(value, chance)
        holder, key = chance.choice(places)
        match chance.randrange(6):
            case 0 if isinstance(holder, list):
                _damage_list(holder, chance)
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[chance.choice((*TEXTS[:8], f"{key}s"))] = holder.pop(key)
            case 2:
                there, where = chance.choice(places)
                holder[key] = json.loads(json.dumps(there[where])) if _plain(there[where]) else None
            case _:
                holder[key] = other(holder[key], chance)
    return value


def _plain(value: Any) -> bool:
    return not isinstance(value, bytes | tuple | set)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


def _damage_list(values: list[Any], chance: Random) -> None:
    at = chance.randrange(len(values))
    match chance.randrange(4):
        case 0:
            del values[at]
        case 1:
            values.insert(chance.randrange(len(values)), values[at])
        case 2:
            values[at:at] = values[at : at + 1] * chance.choice((2, 50))
        case _:
            values.reverse()


def other(value: Any, chance: Random) -> Any:
    """Another value, most often of the same type, which no writer would choose."""
    if chance.random() < 0.3:
        return chance.choice((*OTHERS, *NUMBERS, *TEXTS))
    if isinstance(value, bool):
        return chance.choice((not value, 0, 1, "true"))
    if isinstance(value, int | float):
        return chance.choice(
            (*NUMBERS, value + 1, value - 1, -value, float(value) if abs(value) < 2**900 else 0, str(value))
        )
    if isinstance(value, str):
        return chance.choice((*TEXTS, value * 2, value + "\x07", value[1:]))
    return chance.choice((*OTHERS, *NUMBERS, *TEXTS))


def damage_pickle(data: bytes, chance: Random) -> bytes:
    """A pickle of what the seed, which stands as JSON, holds once it is damaged; some of its values are shared."""
    value = damage_tree(json.loads(data), chance)
    places = list(_places(value))
    if places and chance.random() < 0.2:
        holder, key = chance.choice(places)
        holder[key] = Shared(chance.choice((2, 20, 60)))
    return pickled(value)


class Shared:
    """Lists of two, each of which is twice the list before: written out, two to the power of their number."""

    def __init__(self, depth: int) -> None:
        self.depth = depth


def pickled(value: Any) -> bytes:
    """Plain values as PyTorch pickles them (protocol 2)."""
    return b"\x80\x02" + b"".join(_opcodes(value)) + b"."


def _opcodes(value: Any) -> Iterator[bytes]:
    match value:
        case None | True | False:
            yield {None: b"N", True: b"\x88", False: b"\x89"}[value]
        case int():
            raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            yield b"\x8a" + bytes([len(raw)]) + raw if len(raw) < 256 else b"N"
        case float():
            yield b"G" + struct.pack(">d", value)
        case str():
            raw = value.encode("utf-8", "surrogatepass")
            yield b"X" + struct.pack("<I", len(raw)) + raw
        case list():
            yield b"]("
            for item in value:
                yield from _opcodes(item)
            yield b"e"
        case dict():
            yield b"}("
            for key, item in value.items():
                yield from _opcodes(key)
                yield from _opcodes(item)
            yield b"u"
        case Shared():
            yield b"](" * value.depth + b"]q\x00"
            yield b"".join(b"h%ceq%c" % (number, number + 1) for number in range(value.depth))


# -- tables and other text -----------------------------------------------------------------------------------


def damage_table(data: bytes, chance: Random) -> bytes:
    """Changes cells, rows or columns of a CSV table."""
    rows = list(csv.reader(io.StringIO(data.decode(), newline="")))
    for _ in range(chance.choice((1, 1, 2))):
        row = rows[0] if chance.random() < 0.2 else chance.choice(rows)
        match chance.randrange(5):
            case 0:
                _damage_list(rows, chance)
            case 1 if row:
                _damage_list(row, chance)
            case 2:
                at = chance.randrange(len(rows[0]) or 1)
                rows = [[*cells[:at], *cells[at + 1 :]] for cells in rows]
            case _ if row:
                row[chance.randrange(len(row))] = str(chance.choice((*NUMBERS, *TEXTS)))
        if not any(rows):
            return b""
    text = io.StringIO(newline="")
    # Half the time as no program would write it: whatever stands in a cell, without quotes.
    if chance.random() < 0.5:
        text.write("\n".join(",".join(row) for row in rows))
    else:
        csv.writer(text, lineterminator=chance.choice(("\n", "\r\n", "\r"))).writerows(rows)
    return text.getvalue().encode("utf-8", "surrogatepass")


def damage_tokens(data: bytes, chance: Random) -> bytes:
    """Replaces, drops, repeats or moves words, numbers and brackets of a text."""
    tokens = TOKEN.findall(data.decode())
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        # Not blanks, which are half of what there is.
        places = [at for at, token in enumerate(tokens) if token.strip()] or [0]
        at = chance.choice(places)
        match chance.randrange(6):
            case 0:
                del tokens[at]
            case 1:
                tokens[at:at] = tokens[at : at + chance.choice((1, 1, 5, 40))]
            case 2:
                tokens[at] = tokens[chance.choice(places)]
            case 3:
                tokens[at] = str(chance.choice(NUMBERS))
            case 4:
                tokens.insert(at, chance.choice(TOKENS))
            case _:
                tokens[at] = chance.choice((*TOKENS, *TEXTS))
        if not tokens:
            break
    return "".join(tokens).encode("utf-8", "surrogatepass")


# -- protobuf ------------------------------------------------------------------------------------------------


def damage_graph(data: bytes, chance: Random) -> bytes:
    """Changes fields of an echograph graph, and makes its checksum anew."""
    from echograph.proto import workload_pb2

    return _damage_file(workload_pb2.Graph, data, chance)


def damage_profile(data: bytes, chance: Random) -> bytes:
    """Changes fields of measured durations, and makes the checksum anew."""
    from echograph.proto import profile_pb2

    return _damage_file(profile_pb2.Profile, data, chance)


def _damage_file(kind: Any, data: bytes, chance: Random) -> bytes:
    message = kind.FromString(b"".join(data[f.start : f.end] for f in fields(data)))
    return b"".join(with_checksum([damage_message(message, chance)]))


def damage_onnx(data: bytes, chance: Random) -> bytes:
    """Changes fields of an ONNX model."""
    from onnx import ModelProto

    return damage_message(ModelProto.FromString(data), chance)


def damage_chakra(data: bytes, chance: Random) -> bytes:
    """Changes fields of one message of a Chakra trace, each of which stands behind its length."""
    from echograph.proto import chakra_pb2

    pieces = list(_delimited(data))
    at = chance.randrange(len(pieces))
    if chance.random() < 0.1:
        _damage_list(pieces, chance)
    else:
        kind = chakra_pb2.GlobalMetadata if at == 0 else chakra_pb2.Node
        pieces[at] = damage_message(kind.FromString(pieces[at]), chance)
    return b"".join(_length(len(piece)) + piece for piece in pieces)


def _delimited(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        length = shift = 0
        while True:
            byte, at = data[at], at + 1
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        yield data[at : at + length]
        at += length


def _length(value: int) -> bytes:
    made = bytearray()
    while value >= 0x80:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*made, value])


def damage_message(message: Any, chance: Random) -> bytes:
    """Sets some fields, anywhere in a message, to values that no writer would choose."""
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        _damage_one_field(message, chance)
    found: bytes = message.SerializeToString()
    return found


def _damage_one_field(message: Any, chance: Random) -> None:
    while True:
        if not message.ListFields():
            return
        descriptor, value = chance.choice(message.ListFields())
        repeated = descriptor.is_repeated
        if descriptor.message_type is None:
            break
        if repeated:
            if chance.random() < 0.1 or descriptor.message_type.GetOptions().map_entry:
                _damage_repeated(message, descriptor, value, chance)
                return
            value = chance.choice(value)
        if not value.ListFields():
            return
        message = value
    if not repeated:
        setattr(message, descriptor.name, _other_scalar(descriptor, value, chance))
    elif chance.random() < 0.2:
        del value[chance.randrange(len(value))]
    else:
        at = chance.randrange(len(value))
        value[at] = _other_scalar(descriptor, value[at], chance)


def _damage_repeated(message: Any, descriptor: Any, value: Any, chance: Random) -> None:
    if descriptor.message_type.GetOptions().map_entry:
        message.ClearField(descriptor.name)
    elif chance.random() < 0.5:
        del value[chance.randrange(len(value))]
    else:
        value.add().CopyFrom(chance.choice(value))


def _other_scalar(descriptor: Any, value: Any, chance: Random) -> Any:
    if descriptor.type == descriptor.TYPE_STRING:
        return chance.choice(("", value * 3, "\x1b[31m\n{}{}", "x" * 5000, "\x9b", "\0", "../../x", "/dev/zero"))
    if descriptor.type == descriptor.TYPE_BYTES:
        return chance.randbytes(3)
    if descriptor.type == descriptor.TYPE_BOOL:
        return not value
    if descriptor.cpp_type in (descriptor.CPPTYPE_DOUBLE, descriptor.CPPTYPE_FLOAT):
        return chance.choice((0.0, -1.0, 1e30, math.inf, math.nan))
    if descriptor.enum_type is not None:
        return chance.choice([number.number for number in descriptor.enum_type.values])
    bits = 64 if descriptor.cpp_type in (descriptor.CPPTYPE_INT64, descriptor.CPPTYPE_UINT64) else 32
    number = chance.choice((*EXTREMES, value + 1, value - 1, 2 * value))
    if descriptor.cpp_type in (descriptor.CPPTYPE_UINT64, descriptor.CPPTYPE_UINT32):
        return number % 2**bits
    return (number + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)


FORMS: dict[str, Callable[[bytes, Random], bytes]] = {
    "json": damage_json, "jsonl": damage_lines, "pickle": damage_pickle, "csv": damage_table,
    "toml": damage_tokens, "gml": damage_tokens, "txt": damage_tokens, "log": damage_tokens, "html": damage_tokens,
    "pb": damage_graph,
    "profile": damage_profile, "onnx": damage_onnx, "et": damage_chakra,
}  # fmt: skip

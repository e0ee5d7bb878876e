"""Pickles of plain values, without unpickling them.

`pickletools` only takes a file apart into its opcodes; the few that build dictionaries, lists, tuples, strings,
numbers, truth values and None are followed; a file that has others is refused. Nothing is imported or called, and
no opcode asks for more memory than its own bytes are.
"""

from __future__ import annotations

import pickletools
from typing import Any


def plain_pickle(data: bytes) -> Any:
    """What a pickle of plain values holds.

    Raises:
        ValueError: it holds something else: an object, a function, a reference to a module.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    for opcode, argument, _ in pickletools.genops(data):
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                return stack.pop()
            case "MARK":
                marks.append(len(stack))
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_TUPLE":
                stack.append(())
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[opcode.name])
            case "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                memo[len(memo) if argument is None else argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[int(argument or 0)])
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(opcode.name[-1])
                stack[-count:] = [tuple(stack[-count:])]
            case "TUPLE" | "APPENDS" | "SETITEMS":
                at = marks.pop()
                items = stack[at:]
                del stack[at:]
                _put_in(stack, opcode.name, items)
            case "APPEND":
                item = stack.pop()
                stack[-1].append(item)
            case "SETITEM":
                value, key = stack.pop(), _key(stack.pop())
                stack[-1][key] = value
            case "BINUNICODE" | "SHORT_BINUNICODE" | "BINUNICODE8":
                str(argument).encode()  # a half of a character is none
                stack.append(argument)
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT":
                stack.append(argument)
            case other:
                raise ValueError(f"a pickle with {other}, which plain values do not have")
    raise ValueError("a pickle that does not end")


def _put_in(stack: list[Any], how: str, items: list[Any]) -> None:
    if how == "TUPLE":
        stack.append(tuple(items))
    elif how == "APPENDS":
        stack[-1].extend(items)
    else:
        stack[-1].update(zip(map(_key, items[::2]), items[1::2], strict=True))


def _key(value: Any) -> Any:
    # A tuple of tuples that are shared takes for ever to hash.
    if not isinstance(value, str | int):
        raise ValueError(f"a dictionary with a key that is a {type(value).__name__}")
    return value

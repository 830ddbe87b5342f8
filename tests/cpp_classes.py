"""Count the members of C++ classes, for the tests of the architecture.

A parser for this project's own sources only: formatted by clang-format, without macros in classes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_HEAD = re.compile(r"\b(?<!enum )(?:class|struct)\s+(\w+)(?:\s+final)?(?:\s*:[^;{(]*)?\s*\{")
_NO_MEMBER = re.compile(r"(class|struct|enum|union|friend|using|static_assert)\b")


def members_of_classes(code: str) -> Iterator[tuple[str, int]]:
    """Yield each class in `code`, and how many functions and fields it declares.

    Nested types, friends, aliases, and functions that are deleted or defaulted do not count.

    Args:
        code: C++ without comments, and without the contents of strings.
    """
    code = re.sub(r"(?m)^[ \t]*#(\\\n|[^\n])*", "", code)
    for head in _HEAD.finditer(code):
        body = code[head.end() : _end_of_block(code, head.end())]
        yield head[1], sum(map(_is_member, _declarations(body)))


def _end_of_block(code: str, start: int) -> int:
    depth = 1
    for place in range(start, len(code)):
        depth += {"{": 1, "}": -1}.get(code[place], 0)
        if depth == 0:
            return place
    raise ValueError("a block does not end")


def _declarations(body: str) -> Iterator[str]:
    """Split the body of a class into declarations; the contents of inner blocks are left out."""
    said, place, parentheses = "", 0, 0
    while place < len(body):
        char = body[place]
        if char == "{":
            place = _end_of_block(body, place + 1)
            # A function's body ends its declaration; `int a{1};` and `struct A {};` go on.
            if parentheses == 0 and "(" in said and not re.match(r"\s*[;,]", body[place + 1 :]):
                yield said
                said = ""
            else:
                said += "{}"
        elif char == ";" and parentheses == 0:
            yield said
            said = ""
        else:
            parentheses += {"(": 1, ")": -1}.get(char, 0)
            said += char
        place += 1


def _is_member(declaration: str) -> bool:
    said = re.sub(r"\b(public|private|protected)\s*:(?!:)", "", declaration)
    said = re.sub(r"^\s*template <.*?>\s+(?=\w)", "", said, flags=re.DOTALL).strip()
    return said != "" and not _NO_MEMBER.match(said) and not re.search(r"= (delete|default)$", said)

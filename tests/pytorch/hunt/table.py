"""Parse a text of named pieces of Python, from which random programs are built.

Each piece begins with a line `# name`. A line `place:` follows, then indented lines of Python for
that place of the program; a piece may have several places.
"""

from __future__ import annotations

from textwrap import dedent


def table(text: str) -> dict[str, dict[str, str]]:
    """Return the lines of Python, by name of the piece and by place."""
    found: dict[str, dict[str, list[str]]] = {}
    slot = ""
    for line in text.strip("\n").splitlines():
        if line.startswith("# "):
            slots = found[line[2:]] = {}
        elif line.startswith(" "):
            slots[slot].append(line)
        else:
            slot = line.removesuffix(":")
            slots[slot] = []
    return {
        name: {slot: dedent("\n".join(lines)) for slot, lines in slots.items()}
        for name, slots in found.items()
    }

"""Parse tables of code: `# name`, then places with lines of Python for each."""

from __future__ import annotations

from textwrap import dedent


def table(text: str) -> dict[str, dict[str, str]]:
    """Return the lines by name and place."""
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

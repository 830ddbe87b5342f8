"""Describe the kind of a file by its first bytes, for error messages.

Code that reads files calls `what_is` when a file is not of the expected kind.
"""

from __future__ import annotations

import zipfile
from codecs import getincrementaldecoder
from pathlib import Path
from typing import Final

_STARTS: Final = {
    b"\x89PNG": "a picture (PNG)",
    b"\xff\xd8\xff": "a picture (JPEG)",
    b"GIF8": "a picture (GIF)",
    b"%PDF": "a PDF",
    b"\x1f\x8b": "a gzip file",
    b"\x93NUMPY": "an array of NumPy",
    b"\x89HDF": "an HDF5 file",
    b"\x7fELF": "compiled code",
    b"\x80\x02": "a pickle, or a checkpoint of PyTorch",
    b"\x80\x03": "a pickle",
    b"\x80\x04": "a pickle",
    b"\x80\x05": "a pickle",
}


def what_is(path: str | Path) -> str:
    """Describe a file in words, such as "a checkpoint of PyTorch".

    Args:
        path: The file or folder.

    Raises:
        OSError: The file cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        return "a folder"
    with path.open("rb") as file:
        head = file.read(512)
    if not head:
        return "an empty file"
    if zipfile.is_zipfile(path):
        return _kind_of_archive(path)
    for start, kind in _STARTS.items():
        if head.startswith(start):
            return kind
    if head[8:10] == b'{"' and int.from_bytes(head[:8], "little") < path.stat().st_size:
        return "a checkpoint (safetensors)"
    try:
        # Only the head of the file was read, so its last character may be incomplete.
        text = getincrementaldecoder("utf-8")().decode(head, final=len(head) < 512)
    except UnicodeDecodeError:
        return "bytes"
    return "bytes" if "\0" in text else _kind_of_text(text)


def _kind_of_archive(path: Path) -> str:
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    if any(name.endswith("/data.pkl") for name in names):
        return "a checkpoint of PyTorch"
    return "a program in a zip file" if "__main__.py" in names else "a zip file"


def _kind_of_text(text: str) -> str:
    if '"rekindle report"' in text:
        return "a report, which `rekindle report` shows"
    if '"rekindle": "trace"' in text:
        return "a trace, which `rekindle simulate` and `rekindle plan` read"
    if text.lstrip()[:9].lower() in ("<!doctype", "<html>"):
        return "a web page"
    return repr(text.strip().partition("\n")[0][:40])

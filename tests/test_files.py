"""Tests of errors for files of the wrong kind, which describe the file by its contents."""

from __future__ import annotations

import gzip
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from rekindle._files import what_is
from rekindle.cli import main
from rekindle.trace import chain
from rekindle.trace.formats import save


@pytest.mark.parametrize(
    ("content", "reported"),
    [
        (b"", "an empty file"),
        (b"\x89PNG\r\n\x1a\n", "a picture (PNG)"),
        (pickle.dumps([1]), "a pickle"),
        (gzip.compress(b"x", mtime=0), "a gzip file"),
        ((12).to_bytes(8, "little") + b'{"a":[1,2]} and tensors', "a checkpoint (safetensors)"),
        (b"<!DOCTYPE html>\n<html>", "a web page"),
        (b"\xff\xfe\x00", "bytes"),
        (b"\x00\x01", "bytes"),
        (b"import torch\nx = 1\n", "'import torch'"),
        ("ä".encode() * 600, "'ää"),
        (b"x" + "ä".encode() * 600, "'xää"),  # the first 512 bytes end within a UTF-8 character
        (b"\xff\xfe" * 600, "bytes"),
        (b"text" + b"\xe9" * 600, "bytes"),
    ],
)
def test_kind_of_wrong_file_is_recognized_by_content(
    tmp_path: Path, content: bytes, reported: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    assert what_is(path).startswith(reported)


def test_kind_of_archive_and_folder_is_recognized_by_content(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "weights.pt")
    with zipfile.ZipFile(tmp_path / "program.zip", "w") as archive:
        archive.writestr("__main__.py", "")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("readme", "")
    assert what_is(tmp_path / "weights.pt") == "a checkpoint of PyTorch"
    assert what_is(tmp_path / "program.zip") == "a program in a zip file"
    assert what_is(tmp_path / "other.zip") == "a zip file"
    assert what_is(tmp_path) == "a folder"


@pytest.mark.parametrize("command", ["simulate", "plan", "report"])
def test_command_with_file_of_wrong_kind_names_that_kind(command: str, tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save({}, path)
    result = CliRunner().invoke(main, [command, str(path)])
    assert result.exit_code == 1
    assert str(path) in result.stderr
    assert "got a checkpoint of PyTorch" in " ".join(result.stderr.split())


def test_simulate_of_many_files_names_the_wrong_file(tmp_path: Path) -> None:
    """Several processes read the files, and each reports errors to the main process."""
    for number in range(4):
        save(chain(3), tmp_path / f"{number}.jsonl")
    (tmp_path / "wrong.jsonl").write_text("not a trace")
    result = CliRunner().invoke(main, ["simulate", str(tmp_path), "--jobs", "2"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "wrong.jsonl:1: expected a trace in the format native or" in result.stderr

"""Archives of kernels that were not made by ``export_cache``, or not only: our error, and nothing installed."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import random
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fastlayers import env
from fastlayers.errors import ArgumentError, FastlayersError
from fastlayers.runtime import kernel_cache
from fastlayers.runtime.kernel_cache import MANIFEST, STORES, export_cache, import_cache

Members = list[tuple[tarfile.TarInfo, bytes]]


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A home, a cache and a temporary folder that nothing else writes to."""
    for name in ("home", "cache", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "cache"))
    for store in STORES.values():
        monkeypatch.setenv(store.variable, "")
        monkeypatch.delenv(store.variable)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    yield
    assert list((tmp_path / "temporary").iterdir()) == []  # of every import, refused or not


def written(files: dict[str, bytes], **manifest: Any) -> bytes:
    """Return an archive of these files, unpacked, with a manifest that fits but for what is given."""
    checksums = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    content = {"schema": kernel_cache.SCHEMA, "versions": kernel_cache.versions(), "sha256": checksums} | manifest
    members = [*files.items(), (MANIFEST, json.dumps(content).encode())]
    return packed([(tarfile.TarInfo(name), data) for name, data in members])


def packed(members: Members) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for entry, data in members:
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return stream.getvalue()


def unpacked(data: bytes) -> Members:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return [(entry, archive.extractfile(entry).read()) for entry in archive]  # type: ignore[union-attr]


def installed(tmp_path: Path) -> dict[str, bytes]:
    """Return every file below the home and the cache."""
    places = [tmp_path / "home", tmp_path / "cache"]
    return {
        str(file.relative_to(tmp_path)): file.read_bytes() for p in places for file in p.rglob("*") if file.is_file()
    }


KERNELS = {
    "triton/ABC/k.cubin": b"cubin",
    "triton/ABC/__grp__k.json": json.dumps({"child_paths": {"k.cubin": "there"}}).encode(),
    "deep_gemm/cache/kernel/kernel.cubin": b"deep",
    "flashinfer/.cache/flashinfer/0.6/90a/cached_ops/mla/mla.so": b"elf",
}
GOOD = written(KERNELS)


def refused(tmp_path: Path, data: bytes) -> str:
    """Return the words with which an archive is refused; nothing of it may be there."""
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(data, 1))
    with pytest.raises(ArgumentError, match="an archive of export_cache") as caught:
        import_cache(tmp_path / "a.tar.gz")
    assert installed(tmp_path) == {}
    return str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["triton/" + "n" * 256, "triton/" + "é" * 128, "t/" * 40 + "x", "triton/" + ("p" * 250 + "/") * 20 + "x"],
    ids=["bytes", "letters", "parts", "together"],
)
def test_a_name_that_no_file_has_is_refused(name: str, tmp_path: Path) -> None:
    words = refused(tmp_path, written(KERNELS | {name: b""}))
    assert "longer than names of files are" in words or "File name too long" in words
    assert len(words) < 1000


@pytest.mark.parametrize(
    "manifest",
    [
        {"versions": {"triton": ["3"]}}, {"versions": 3}, {"versions": None}, {"sha256": {n: None for n in KERNELS}},
        {"sha256": {n: [hashlib.sha256(d).hexdigest()] for n, d in KERNELS.items()}}, {"sha256": "x"}, {"schema": "2"},
        {"schema": True}, {"schema": [2]},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_types_in_the_manifest_are_refused(manifest: dict[str, Any], tmp_path: Path) -> None:
    refused(tmp_path, written(KERNELS, **manifest))


@pytest.mark.parametrize("name", [".bashrc", ".cache/other", ".cache/flashinfer/../../.bashrc"])
def test_nothing_is_installed_outside_of_the_caches(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """flashinfer's directory is the home directory where no variable is set."""
    monkeypatch.delenv(env.CACHE_DIR)
    words = refused(tmp_path, written(KERNELS | {f"flashinfer/{name}": b"alias ls=rm"}))
    assert "is not in the cache of flashinfer" in words or "not a file below the archive's root" in words


def test_children_of_a_group_are_files_beside_it(tmp_path: Path) -> None:
    for child in ("..", ".", "", "a/b", "/etc/passwd"):
        group = {"triton/A/__grp__k.json": json.dumps({"child_paths": {child: ""}}).encode()}
        assert "does not list files of its own directory" in refused(tmp_path, written(group))


def test_a_directory_in_the_way_is_found_before_anything_is_installed(tmp_path: Path) -> None:
    root = kernel_cache.prepare()
    assert root is not None
    # The last of the files in the order in which they are installed.
    (root / "flashinfer" / ".cache/flashinfer/0.6/90a/cached_ops/mla/mla.so").mkdir(parents=True)
    assert "is a directory here, a file there" in refused(tmp_path, GOOD)


def test_a_sparse_file_is_refused_however_long_it_says_it_is(tmp_path: Path) -> None:
    entry = tarfile.TarInfo("triton/A/k.cubin")
    entry.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(2**60)}
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(entry, io.BytesIO())
    assert "is not a file below the archive's root" in refused(tmp_path, stream.getvalue())


@pytest.mark.parametrize("path", ["a\0b", "a" * 300, "\ud800", 5, None, b"x", ["x"]], ids=ascii)
@pytest.mark.parametrize("verb", [export_cache, import_cache])
def test_what_is_no_path_is_refused(verb: Callable[[Any], Any], path: Any) -> None:
    with pytest.raises(ArgumentError, match=f"{verb.__name__}: path is "):
        verb(path)


def test_an_export_replaces_files_only(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", tmp_path / "home" / ".." / "pipe"):
        with pytest.raises(ArgumentError, match="a file to write, in a directory that exists"):
            export_cache(place)
    assert (tmp_path / "pipe").is_fifo()


# ---- any archive -----------------------------------------------------------------------------------------------

NAMES = (
    "", ".", "..", "/", "//x", "a\\b", "C:x", "triton", "triton/", "triton/ABC", "triton/ABC/k.cubin/x", "deep_gemm",
    "é" * 99, MANIFEST, "./" + MANIFEST, "triton/../x", "triton/./ABC/k.cubin", "n" * 300, "d/" * 2000, "\udcff",
    "a\nb", "x" * 99,
)  # fmt: skip
VALUES: tuple[Any, ...] = (None, True, -1, 2**70, 1.5, "", "x", "é\ud800", [], [1], {}, {"a": {}}, [[[]]], "9" * 5000)


def _bytes(drawn: random.Random, data: bytes) -> bytes:
    """Change, drop, double or append bytes."""
    broken, at = bytearray(data), drawn.randrange(len(data))
    choice = drawn.randrange(5)
    if choice == 0:
        broken[at] ^= 1 << drawn.randrange(8)
    elif choice == 1:
        broken[at : at + drawn.choice((1, 8, 512, 5000))] = b""
    elif choice == 2:
        broken[at:at] = broken[at : at + 512]
    elif choice == 3:
        broken[at : at + 8] = drawn.randbytes(8)
    else:
        broken += drawn.randbytes(drawn.choice((1, 512, 1024)))
    return bytes(broken)


def _entry(drawn: random.Random, data: bytes) -> bytes:
    """Change what an archive says of one of its files, or their order."""
    members = unpacked(data)
    entry, content = drawn.choice(members)
    choice = drawn.choice((0, 0, 0, 1, 2, 3, 4, 5, 6))
    if choice == 0:
        entry.name = drawn.choice(NAMES)
    elif choice == 1:
        entry.type = drawn.choice((b"0", b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"S", b"x", b"L", b"Z"))
        entry.linkname = drawn.choice(("", "/etc/passwd", "../x"))
    elif choice == 2:
        entry.mode = drawn.choice((0, 0o777777, 0o4755))
        entry.mtime = drawn.choice((0, -5, 2**33, 2**62))
    elif choice == 3:
        entry.pax_headers = {
            drawn.choice(("mtime", "size", "path", "linkpath", "GNU.sparse.realsize", "hdrcharset")): drawn.choice(
                ("nan", "inf", "-1", "x", "1e300", "a\0b", "9" * 30, "BINARY")
            )
        }
    elif choice == 4:
        members.append((entry, drawn.choice((content, b"other"))))
    elif choice == 5:
        members.remove((entry, content))
    else:
        drawn.shuffle(members)
    return packed(members)


def _manifest(drawn: random.Random, data: bytes) -> bytes:
    """Put something else somewhere into the manifest, or into a group of files, whose checksum is then right."""
    members = unpacked(data)
    contents = {entry.name: content for entry, content in members}
    which = drawn.choice((MANIFEST, MANIFEST, "triton/ABC/__grp__k.json"))
    parsed = json.loads(contents[which])
    place, value = parsed, drawn.choice(VALUES)
    while isinstance(place, dict) and place and drawn.random() < 0.7:
        key = drawn.choice(sorted(place))
        if isinstance(place[key], dict) and place[key] and drawn.random() < 0.8:
            place = place[key]
            continue
        place[key] = value
        break
    else:
        place["more" if drawn.random() < 0.5 else "triton/more"] = value
    if which == MANIFEST:
        text = drawn.choice((json.dumps(parsed), json.dumps(value), "[" * 5000, "NaN", json.dumps(parsed)[:-3]))
        contents[MANIFEST] = text.encode() if drawn.random() < 0.9 else text.encode("utf-16")
        return packed([(entry, contents[entry.name]) for entry, _ in members])
    contents[which] = json.dumps(parsed).encode()
    return written({name: content for name, content in contents.items() if name != MANIFEST})


def mutations(count: int) -> Iterator[tuple[int, bytes]]:
    """Yield that many archives, as they are on disk."""
    for seed in range(count):
        drawn = random.Random(seed)
        if seed % 4 == 3:
            yield seed, _bytes(drawn, gzip.compress(GOOD, 1, mtime=0))
        else:
            yield seed, gzip.compress((_bytes, _entry, _manifest)[seed % 4](drawn, GOOD), 1, mtime=0)


@pytest.mark.parametrize("count", [80, pytest.param(640, marks=pytest.mark.slow)])
def test_any_archive_is_installed_whole_or_refused_in_our_words(count: int, tmp_path: Path) -> None:
    archive, taken = tmp_path / "a.tar.gz", 0
    archive.write_bytes(gzip.compress(GOOD))
    assert import_cache(archive) == ["triton", "deep_gemm", "flashinfer"]
    whole = installed(tmp_path)
    assert len(whole) == len(KERNELS)
    for seed, data in mutations(count):
        for file in whole:
            (tmp_path / file).unlink(missing_ok=True)
        archive.write_bytes(data)
        try:
            import_cache(archive)
        except FastlayersError:
            assert installed(tmp_path) == {}, seed
            continue
        taken += 1
        found = installed(tmp_path)
        # What else there is was listed with its checksum; of other versions, nothing is taken.
        for name in (file for file in whole if file in found and "__grp__" not in file):
            assert found[name] == whole[name], seed
    assert count < 16 * taken < 10 * count, taken

"""Places by address."""

from __future__ import annotations

import pickle
from pathlib import Path

import fsspec
import pytest

from megalite.config.errors import UserError
from megalite.files.remote import Remote, file_sizes, here, is_address, place
from tests.s3 import at


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("runs/a", Path("runs/a")),
        ("/runs/s3:/a", Path("/runs/s3:/a")),
        ("file:///runs/a", Path("/runs/a")),
        ("s3://bucket/run", Remote("s3", "bucket/run")),
        ("s3://bucket//run/../run/", Remote("s3", "bucket/run")),
        ("s3://bucket", Remote("s3", "bucket")),
        (Path("runs"), Path("runs")),
        (Remote("s3", "bucket"), Remote("s3", "bucket")),
    ],
)
def test_an_address_is_no_path(given: str | Path | Remote, found: Path | Remote) -> None:
    assert place(given) == found
    assert isinstance(given, Remote) or is_address(str(given)) == ("://" in str(given))


@pytest.mark.parametrize("address", ["s3://", "s3:///", "s3://../run"])
def test_an_address_without_a_place_is_refused(address: str) -> None:
    with pytest.raises(UserError, match="names no place: give one like s3://BUCKET/FOLDER"):
        place(address)


def test_a_remote_has_what_is_used_of_a_path(tmp_path: Path) -> None:
    for root in (tmp_path, at("memory://like/path")):
        folder = root / "iter_0000001"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "a.json").write_text("ü")
        (folder / "b.bin").write_bytes(b"1234567890")
        assert (folder.name, (folder / "a.json").suffix, folder.parent) == ("iter_0000001", ".json", root)
        assert (root.exists(), root.is_dir(), (folder / "a.json").is_file()) == (True, True, True)
        assert not (folder / "c").exists() and not (folder / "c").is_dir()
        assert sorted(each.name for each in folder.iterdir()) == ["a.json", "b.bin"]
        assert [each.name for each in folder.glob("*.bin")] == ["b.bin"]
        assert file_sizes(folder) == {"a.json": 2, "b.bin": 10}
        assert (folder / "a.json").read_text(encoding="utf-8") == "ü"
        with (folder / "b.bin").open("rb") as stream:
            stream.seek(3)
            assert stream.read(4) == b"4567"
        local, _living = here(folder)
        assert (local / "b.bin").read_bytes() == b"1234567890"
        (folder / "a.json").unlink()
        (folder / "a.json").unlink(missing_ok=True)
        with pytest.raises(FileNotFoundError):
            (folder / "a.json").read_bytes()


def test_a_remote_goes_to_another_process_as_its_address() -> None:
    assert pickle.loads(pickle.dumps(Remote("s3", "bucket/run"))) == Remote("s3", "bucket/run")


def test_what_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "filesystem", missing)
    with pytest.raises(UserError, match=r"s3://bucket/run needs s3fs: pip install 'megalite\[s3\]'"):
        place("s3://bucket/run").exists()

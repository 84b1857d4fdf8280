"""Images on disk, once each, whole or not at all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from PIL import Image as PILImage

from agentrl import DataError, Image
from agentrl.image_store import ImageStore


def picture(i: int) -> Image:
    return Image(PILImage.new("RGB", (4, 4), (i, 0, 0)))


def test_what_is_stored_comes_back_under_its_hash(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "images")
    sha = store.put(picture(1))
    assert sha == store.put(picture(1)) == picture(1).sha256
    assert [file.name for file in store.folder.iterdir()] == [f"{sha}.png"]
    back = ImageStore(store.folder).get(sha)
    assert (back.sha256, back.png) == (sha, picture(1).png)


def test_bytes_of_another_pillow_come_back_as_they_were(tmp_path: Path) -> None:
    import io

    buffer = io.BytesIO()
    picture(1).pil.save(buffer, "PNG", compress_level=9)
    elsewhere = Image.from_png(buffer.getvalue())
    store = ImageStore(tmp_path)
    assert store.get(store.put(elsewhere)).sha256 == elsewhere.sha256


def test_missing_and_changed_images_are_data_errors(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    with pytest.raises(DataError, match="is not in"):
        store.get("0" * 64)
    sha = store.put(picture(1))
    (tmp_path / f"{sha}.png").write_bytes(picture(2).png)
    with pytest.raises(DataError, match="not what was stored"):
        store.get(sha)


def test_many_writers_leave_whole_files_and_nothing_else(tmp_path: Path) -> None:
    stores = [ImageStore(tmp_path / "images") for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: stores[i % 8].put(picture(i // 8)), range(160)))
    assert {file.name for file in (tmp_path / "images").iterdir()} == {f"{picture(i).sha256}.png" for i in range(20)}
    for i in range(20):
        assert stores[0].get(picture(i).sha256) == picture(i)


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    store = ImageStore(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", full)
        with pytest.raises(OSError, match="No space"):
            store.put(picture(1))
    assert list(tmp_path.iterdir()) == []
    store.get(store.put(picture(1)))

"""Pictures in every form, and what counts as a message."""

from __future__ import annotations

import base64
import copy
import io
import pickle
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as PILImage

from agentrl import Action, DataError, Image, Text, ToolCall
from agentrl.messages import as_message, message_images, message_text, normalize


def pixels() -> PILImage.Image:
    picture = PILImage.new("RGB", (3, 2))
    picture.putdata([(i * 40, 255 - i, i) for i in range(6)])
    return picture


def encoded(picture: PILImage.Image, fmt: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, fmt, **options)
    return buffer.getvalue()


def array(image: Image) -> np.ndarray:
    return np.asarray(image.pil)


def test_six_forms_of_a_picture_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    png = encoded(pixels())
    (tmp_path / "a.png").write_bytes(png)
    monkeypatch.chdir(tmp_path)
    forms = [
        pixels(),
        str(tmp_path / "a.png"),
        Path("a.png"),
        png,
        "data:image/png;base64," + base64.b64encode(png).decode(),
        Image(pixels()),
    ]
    images = [Image(form) for form in forms]
    for image in images:
        assert (array(image) == np.asarray(pixels())).all()
        assert image.size == (3, 2)
    assert len({image.sha256 for image in images}) == 1
    assert len(set(images)) == 1 and all(image == images[0] for image in images)


def test_metadata_changes_no_hash() -> None:
    plain = Image(pixels())
    profile = encoded(pixels(), icc_profile=b"some profile", dpi=(300, 300))
    assert Image(profile).sha256 == plain.sha256
    assert Image(encoded(pixels(), "BMP")).sha256 == Image(encoded(pixels(), "TIFF")).sha256 == plain.sha256


def test_exif_orientation_is_applied() -> None:
    exif = PILImage.Exif()
    exif[0x0112] = 6
    turned = Image(encoded(pixels(), exif=exif))
    assert turned.size == (2, 3)
    assert (array(turned) == np.asarray(pixels().transpose(PILImage.Transpose.ROTATE_270))).all()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "RGBa", "P", "RGB", "L"])
def test_transparency_is_shown_on_white(mode: str) -> None:
    if mode in ("P", "RGB", "L"):
        see_through = PILImage.new(mode, (2, 1), 0)
        source: Any = encoded(see_through, transparency=(0, 0, 0) if mode == "RGB" else 0)
    else:
        source = PILImage.new("RGBA", (2, 1), (0, 0, 0, 0)).convert(mode)
    assert array(Image(source)).tolist() == [[[255, 255, 255]] * 2]


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr", "HSV", "LAB", "I", "F", "I;16"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    assert Image(PILImage.new(mode, (2, 2))).pil.mode == "RGB"


def greys(mode: str, values: list[float]) -> PILImage.Image:
    picture = PILImage.new(mode, (len(values), 1))
    picture.putdata(values)
    return picture


def test_greys_of_more_than_8_bits_are_scaled_or_refused() -> None:
    ramp = [0, 100, 128, 257, 1000, 32768, 65535]
    scaled = [round(value / 257) for value in ramp]
    deep = PILImage.fromarray(np.array([ramp], np.uint16))
    for source in (deep, encoded(deep), encoded(deep, "TIFF")):
        assert array(Image(source))[0].tolist() == [[grey] * 3 for grey in scaled]
    assert array(Image(encoded(deep, transparency=65535)))[0, :, 0].tolist() == [*scaled[:-1], 255]
    assert array(Image(encoded(deep, transparency=0)))[0, :, 0].tolist()[0] == 255
    assert array(Image(greys("I", [0, 100, 255])))[0, :, 0].tolist() == [0, 100, 255]
    assert array(Image(greys("F", [0.0, 0.4, 1.6, 200.0])))[0, :, 0].tolist() == [0, 0, 2, 200]
    for mode, values in (("I", [0, 70000]), ("I", [-1, 3]), ("F", [0.0, 300.0]), ("F", [float("nan"), 1.0])):
        with pytest.raises(DataError, match="bring them to 0 to 255"):
            Image(greys(mode, values))


def test_pickling_and_copying_keep_bytes_and_hash() -> None:
    for source in (pixels(), encoded(pixels(), "JPEG"), encoded(pixels())):
        image = Image(source)
        for other in (pickle.loads(pickle.dumps(image)), copy.deepcopy(image)):
            assert (other.sha256, other.png) == (image.sha256, image.png)
            assert (array(other) == array(image)).all()


def test_bytes_of_another_pillow_keep_their_hash() -> None:
    elsewhere = encoded(pixels(), compress_level=9)
    image = Image.from_png(elsewhere)
    assert image.png == elsewhere
    assert image.sha256 != Image(pixels()).sha256
    assert pickle.loads(pickle.dumps(image)).sha256 == image.sha256
    assert (array(image) == np.asarray(pixels())).all()


def test_a_picture_is_a_snapshot() -> None:
    canvas = pixels()
    before = Image(canvas)
    canvas.putpixel((0, 0), (9, 9, 9))
    assert before != Image(canvas)
    assert (array(before) == np.asarray(pixels())).all()


@pytest.mark.parametrize(
    "source",
    [b"", b"no picture", "/no/such/file.png", "data:image/png,abc", "data:image/png;base64,!!", "a\0b", "x" * 5000],
)
def test_what_is_no_picture_is_a_data_error(source: Any) -> None:
    image = Image(source)
    assert repr(image).startswith("Image("), "a repr never fails"
    with pytest.raises(DataError):
        _ = image.pil


@pytest.mark.parametrize("source", [None, 7, ["a"], np.zeros((2, 2, 3), np.uint8)])
def test_other_types_are_refused_at_once(source: Any) -> None:
    with pytest.raises(DataError, match="must be a PIL image"):
        Image(source)


def test_broken_files_raise_nothing_but_data_errors() -> None:
    rng = random.Random(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for fmt in ("PNG", "JPEG", "GIF"):
            whole = encoded(pixels(), fmt)
            for _ in range(60):
                broken = bytearray(whole)
                for _ in range(3):
                    broken[rng.randrange(len(broken))] = rng.randrange(256)
                try:
                    _ = Image(bytes(broken[: rng.randrange(len(broken))])).png
                except DataError:
                    continue


# ---------------------------------------------------------------------- messages


def test_observations_become_messages() -> None:
    picture = Image(pixels())
    assert normalize("hi") == [{"role": "user", "content": "hi"}]
    assert normalize(["a", picture]) == [{"role": "user", "content": ["a", picture]}]
    assert normalize([pixels()])[0]["content"] == [picture]
    messages = [{"role": "tool", "tool_call_id": "1", "content": None}, {"role": "user", "content": [Text("a")]}]
    assert normalize(messages) == messages
    assert normalize([]) == [{"role": "user", "content": []}]
    parts = [{"type": "text", "text": "a"}, {"type": "image", "image": encoded(pixels())}]
    url = "data:image/png;base64," + base64.b64encode(encoded(pixels())).decode()
    parts += [{"type": "image_url", "image_url": {"url": url}}, {"type": "input_text", "text": "b"}]
    (message,) = normalize(parts)
    assert message_images([message]) == [picture, picture]
    assert message_text(message) == "ab"


@pytest.mark.parametrize(
    "observation",
    [None, 7, {"role": "user"}, [7], [None], [["a"]], [{"type": "text"}], [{"role": "user"}, "x"], [{"role": 3}]],
)
def test_what_is_no_observation_is_a_data_error(observation: Any) -> None:
    with pytest.raises(DataError):
        normalize(observation)


BAD_CALLS: list[Any] = ["bad", {"name": "f"}, ["x"], [{}], [{"name": 3}], [{"function": "f"}], [{"function": {}}]]
BAD_CALLS += [[{"function": {"name": "f", "arguments": arguments}}] for arguments in (3, ["x"])]


@pytest.mark.parametrize(
    "message",
    [
        *(None, "x", {}, {"role": None}, {"role": "user", "content": 7}),
        *({"role": "assistant", "content": "a", "tool_calls": calls} for calls in BAD_CALLS),
    ],
)
def test_what_is_no_message_is_a_data_error(message: Any) -> None:
    with pytest.raises(DataError):
        as_message(message)


def test_an_action_is_a_str_that_keeps_what_it_carries() -> None:
    action = Action("hi ", tool_calls=[ToolCall("1", "f", {}, "{}")], token_ids=[1, 2], finish_reason="length")
    for other in (action, pickle.loads(pickle.dumps(action)), copy.deepcopy(action)):
        assert (other, other.token_ids, other.finish_reason) == ("hi ", (1, 2), "length")
        assert other.tool_calls[0].name == "f"
    assert type(action.strip()) is str
    assert (Action(), Action().tool_calls, Action().finish_reason) == ("", (), "stop")

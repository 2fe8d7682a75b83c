"""Images as users give them: read in every form, and put where conversations show them."""

import base64
from io import BytesIO

import pytest
from PIL import Image

from covey.rollout.images import ImageError, read_image, with_images
from covey.rollout.prompts import row_images

CAT = Image.new("RGB", (3, 2), (255, 0, 0))


def as_png(image):
    data = BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


def forms(folder):
    path = folder / "cat.png"
    path.write_bytes(as_png(CAT))
    url = "data:image/png;base64," + base64.b64encode(as_png(CAT)).decode()
    return [
        CAT,
        str(path),
        path,
        f"file://{path}",
        as_png(CAT),
        {"bytes": as_png(CAT), "path": None},
        {"bytes": None, "path": str(path)},
        url,
        CAT.convert("RGBA"),
    ]


def test_every_form_is_the_same_image(tmp_path):
    for given in forms(tmp_path):
        read = read_image(given)
        assert (read.mode, read.size, read.getpixel((0, 0))) == ("RGB", (3, 2), (255, 0, 0))


RED = (255, 0, 0)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (CAT.convert("P"), RED),
        (CAT.convert("CMYK"), RED),
        (Image.new("1", (3, 2), 1), (255, 255, 255)),
        (Image.new("RGBA", (3, 2), (255, 0, 0, 0)), (255, 255, 255)),  # transparent: as on a white page
        (Image.new("LA", (3, 2), (0, 51)), (204, 204, 204)),  # black, a fifth of it: 255 - 51
        (Image.new("I;16", (3, 2), 0x8000), (128, 128, 128)),  # half of 65536 is half of 256
        (Image.new("I", (3, 2), 200), (200, 200, 200)),
    ],
)
def test_every_kind_of_pixel_becomes_rgb(given, expected):
    read = read_image(given)
    assert (read.mode, read.getpixel((0, 0))) == ("RGB", expected)
    data = BytesIO()
    if given.mode not in ("CMYK", "I"):
        given.save(data, "PNG")
        assert read_image(data.getvalue()).getpixel((0, 0)) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Image.new("I", (3, 2), 70000), "mode 'I'"),
        (Image.new("F", (3, 2), 0.5), "mode 'F'"),
        (Image.new("RGB", (0, 2)), "no pixels: it is 0x2"),
    ],
)
def test_images_of_unknown_range_or_size_are_refused(given, message):
    with pytest.raises(ImageError, match=message):
        read_image(given)


def test_a_photograph_stands_upright():
    """Orientation 6 in the file says: turn it by 90 degrees."""
    data, tags = BytesIO(), Image.Exif()
    tags[0x0112] = 6
    CAT.save(data, "JPEG", exif=tags)
    assert read_image(data.getvalue()).size == (2, 3)


@pytest.mark.parametrize(
    "given", [b"", b"no picture", as_png(CAT)[:40], "no/such/file.png", "data:image/png;base64,%", {}]
)
def test_unreadable_images_are_named_in_the_error(given):
    with pytest.raises(ImageError, match="image 3"):
        read_image(given, "image 3")


def test_columns_hold_one_image_or_several_or_none():
    assert row_images({"image": "a"}) == ["a"]
    assert row_images({"images": ["a", "b"], "image": None}) == ["a", "b"]
    assert row_images({"images": [], "image": None}) == row_images({}) == []


def text(words):
    return {"type": "text", "text": words}


def test_images_of_a_column_come_first_where_no_part_shows_them():
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "What?"}
    messages, shown = with_images([system, user], ["a", "b"])
    assert [message["content"] for message in messages] == [
        [text("Be brief.")],
        [{"type": "image"}, {"type": "image"}, text("What?")],
    ]
    assert shown == ["a", "b"] and user["content"] == "What?"


def test_parts_keep_their_images_and_columns_fill_the_others():
    parts = [{"type": "image", "image": "own", "text": None}, text("or"), {"type": "image"}]
    messages, shown = with_images([{"role": "user", "content": parts}], ["column"])
    assert messages[0]["content"] == [{"type": "image"}, text("or"), {"type": "image"}]
    assert shown == ["own", "column"]


@pytest.mark.parametrize("given", [["a"], ["a", "b", "c"]])
def test_image_parts_and_images_must_match_in_number(given):
    with pytest.raises(ImageError, match=f"2 image parts.*{len(given)} images"):
        with_images([{"role": "user", "content": [{"type": "image"}, {"type": "image"}]}], given)


def test_the_url_of_an_image_part_may_be_data():
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    assert with_images([{"role": "user", "content": [part]}], [])[1] == ["data:image/png;base64,AA=="]

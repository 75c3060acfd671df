"""The command ``show``."""

import io
import pickle
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.kits.shards import image_samples, jpeg_bytes, sample_members, tar_bytes, text_samples, write_tar
from tests.kits.tool_kit import run_wds
from torchdata_wds.cli.show import SampleSummary, write_page
from torchdata_wds.cli.show.summaries import FieldSummary


@pytest.fixture
def shard(tmp_path: Path) -> str:
    """Twelve samples of jpg, json and cls."""
    return write_tar(tmp_path / "x.tar", image_samples("s", 12))


def images_of(path: Path) -> list[dict[str, str | None]]:
    """The images of a page."""
    found: list[dict[str, str | None]] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag == "img":
                found.append(dict(attrs))

    Reader().feed(path.read_text(encoding="utf-8"))
    return found


# ------------------------------------------------------------------------------------------------------------- text
def test_show_prints_samples_with_their_fields_when_run(tmp_path: Path) -> None:
    """Key and shard, then a line a field: name, size, value."""
    members = [
        *sample_members("a", cls=b"3", json=b'{"x": [1, 2]}', txt=b"two\nlines"),
        *sample_members("b", jpg=jpeg_bytes(1)),
    ]
    path = write_tar(tmp_path / "x.tar", members)
    done = run_wds("show", path)
    size = f"{len(jpeg_bytes(1)):,}"
    assert done.text == (
        f"a  {path}\n  cls    1 B  3\n  json  13 B  "
        '{"x": [1, 2]}'
        f"\n  txt    9 B  two\\nlines\n\n"
        f"b  {path}\n  jpg  {size} B  {_described(jpeg_bytes(1))}\n"
    )
    assert (done.status, done.err) == (0, "")


def _described(data: bytes) -> str:
    with Image.open(io.BytesIO(data)) as image:
        return f"JPEG image, {image.mode}, {image.width} x {image.height}"


@pytest.mark.parametrize(
    ("options", "count"),
    [([], 10), (["-c", "2"], 2), (["-c", "99"], 12), (["--slice", "3:5"], 2), (["--slice", "2:"], 10)],
)
def test_show_prints_so_many_samples_when_asked(options: list[str], count: int, shard: str) -> None:
    """Ten, if nothing else is said; and then it says whether there are more."""
    done = run_wds("show", *options, shard)
    assert (done.text.count(shard), done.status) == (count, 0)
    assert done.err == ("" if options else "wds: these are the first 10 samples, and more follow: see --count\n")


def test_show_is_content_when_damage_follows_what_it_shows(tmp_path: Path) -> None:
    """Nobody asked for that part."""
    path = tmp_path / "x.tar"
    path.write_bytes(tar_bytes(text_samples("s", 11))[:-2000])
    done = run_wds("show", path)
    assert (done.text.count(str(path)), done.status, done.err) == (10, 0, "")
    skipping = run_wds("show", "--errors", "skip", path)
    assert (skipping.status, skipping.err) == (0, "")


def test_show_reads_no_further_than_one_sample_when_the_rest_has_no_such_field(tmp_path: Path) -> None:
    """That one is not looked for, and not counted."""
    path = write_tar(tmp_path / "x.tar", [*text_samples("a", 10), *sample_members("b", jpg=b""), *text_samples("c", 1)])
    done = run_wds("show", "-f", "txt", "--missing", "skip", path)
    assert (done.status, done.err) == (0, "wds: these are the first 10 samples, and more follow: see --count\n")


def test_show_cuts_and_chooses_when_asked(tmp_path: Path) -> None:
    """Long values at the width, and only the fields that were named."""
    path = write_tar(tmp_path / "x.tar", sample_members("a", txt=b"x" * 500, cls=b"1"))
    assert run_wds("show", "-f", "txt", "-w", "20", path).text == f"a  {path}\n  txt  500 B  {'x' * 17}...\n"


def test_show_runs_nothing_when_a_field_is_a_pickle(tmp_path: Path) -> None:
    """It says so, and that is no failure."""

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (tmp_path / "made",)  # type: ignore[return-value]

    done = run_wds("show", write_tar(tmp_path / "x.tar", sample_members("a", pyd=pickle.dumps(Evil()))))
    assert (done.status, "a pickle, not loaded" in done.text) == (0, True)
    assert not (tmp_path / "made").exists()


def test_show_fails_when_a_field_does_not_decode(tmp_path: Path) -> None:
    """The reason stands there, the rest is shown, and the status is 1."""
    path = write_tar(tmp_path / "x.tar", [*sample_members("a", jpg=b"no image"), *sample_members("b", cls=b"1")])
    done = run_wds("show", path)
    assert "does not decode: not an image of a known format" in done.text
    assert "\nb  " in done.text
    assert (done.status, done.err) == (1, "wds: 1 field does not decode (see there)\n")


def test_show_escapes_when_names_act_on_a_terminal(tmp_path: Path) -> None:
    """Keys, fields, shards and values."""
    done = run_wds("show", write_tar(tmp_path / "\x1b[2J.tar", [("k\x1b[2J.f\x1b[2J", b"v\x1b[2J")]))
    assert "\x1b" not in done.text
    assert done.text.lower().count(r"\x1b[2j") == 3  # and the value is no text: its bytes are shown


def test_show_fails_when_the_shard_is_cut(tmp_path: Path) -> None:
    """After the whole samples before the damage."""
    path = tmp_path / "x.tar"
    path.write_bytes(tar_bytes(image_samples("s", 3))[:-2000])
    done = run_wds("show", path)
    assert done.status == 1
    assert "s00001  " in done.text
    assert "wds show: error: " in done.err


# ----------------------------------------------------------------------------------------------------------- sheets
@pytest.mark.parametrize(("name", "form"), [("sheet.jpg", "JPEG"), ("SHEET.PNG", "PNG")])
def test_show_draws_a_sheet_when_the_name_says_so(name: str, form: str, shard: str, tmp_path: Path) -> None:
    """Of so many columns, of images of this size."""
    done = run_wds("show", "--out", tmp_path / name, "-c", "7", "--columns", "3", "--size", "120", shard)
    assert (done.status, done.text, done.err) == (0, "", "")
    with Image.open(tmp_path / name) as sheet:
        assert (sheet.format, sheet.mode) == (form, "RGB")
        assert sheet.size == (3 * 128 + 8, 3 * (120 + 50) + 8)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["x.tar", name])


def test_sheet_shows_each_image_field_when_samples_have_several(tmp_path: Path) -> None:
    """Unless one is chosen; samples without images are passed over."""
    members = [("a.jpg", jpeg_bytes(0)), ("a.left.jpg", jpeg_bytes(1)), ("b.txt", b"none"), ("c.jpg", jpeg_bytes(2))]
    path = write_tar(tmp_path / "x.tar", members)
    for options, count in (([], 3), (["-f", "jpg", "--missing", "skip"], 2)):
        assert run_wds("show", "--out", tmp_path / "s.png", "--force", "--columns", "9", *options, path).status == 0
        with Image.open(tmp_path / "s.png") as sheet:
            assert sheet.width == count * 168 + 8


def test_sheet_has_the_fields_that_were_chosen_by_name(shard: str, tmp_path: Path) -> None:
    """Below their images; without --fields, images alone. A page has them as well."""
    plain, chosen = tmp_path / "plain.png", tmp_path / "chosen.png"
    assert run_wds("show", "--out", plain, shard).status == 0
    assert run_wds("show", "-f", "jpg cls", "--out", chosen, shard).status == 0
    with Image.open(plain) as before, Image.open(chosen) as after:
        assert (after.width, after.height) == (before.width, before.height + 17 * (before.height // 170))
    assert run_wds("show", "-f", "jpg cls", "--out", tmp_path / "x.html", shard).status == 0
    assert "<th>cls</th>" in (tmp_path / "x.html").read_text()


def test_sheet_says_so_when_an_image_is_damaged(tmp_path: Path) -> None:
    """A tile in place of the image, and status 1; the sheet is there."""
    path = write_tar(tmp_path / "x.tar", [("a.jpg", jpeg_bytes(0)), ("b.jpg", jpeg_bytes(1)[:-40])])
    done = run_wds("show", "--out", tmp_path / "s.png", path)
    assert done.status == 1
    assert "1 field does not decode" in done.err
    with Image.open(tmp_path / "s.png") as sheet:
        pixels = np.asarray(sheet)
    assert (pixels[8:168, 8 + 168 : 168 + 168] == (250, 225, 225)).all(axis=2).mean() > 0.7
    assert not (pixels[8:168, 8:168] == (250, 225, 225)).all(axis=2).any()


def test_show_refuses_when_the_output_exists(shard: str, tmp_path: Path) -> None:
    """Before anything is read; and replaces it only when told to."""
    path = tmp_path / "s.png"
    path.write_bytes(b"mine")
    done = run_wds("show", "--out", path, tmp_path / "x.tar")
    assert done.status == 1
    assert "already exists; pass --force" in done.err
    assert path.read_bytes() == b"mine"
    assert run_wds("show", "--out", path, "--force", shard).status == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["s.png", "s.html"])
def test_show_leaves_nothing_when_it_fails(name: str, tmp_path: Path) -> None:
    """No half page, no temporary file, and not the loss of what was there."""
    path = tmp_path / "x.tar"
    path.write_bytes(tar_bytes(image_samples("s", 3))[:-2000])
    assert run_wds("show", "--out", tmp_path / name, path).status == 1
    assert [each.name for each in tmp_path.iterdir()] == ["x.tar"]
    (tmp_path / name).write_bytes(b"old")
    assert run_wds("show", "--out", tmp_path / name, "--force", path).status == 1
    assert (tmp_path / name).read_bytes() == b"old"


def test_show_fails_when_there_is_no_image_to_draw(tmp_path: Path) -> None:
    """It says how many samples it looked at."""
    path = write_tar(tmp_path / "x.tar", sample_members("a", txt=b""))
    done = run_wds("show", "--out", tmp_path / "s.png", path)
    assert done.status == 1
    assert "no image in 1 sample" in done.err


def test_sheet_is_refused_when_it_would_be_too_large(shard: str, tmp_path: Path) -> None:
    """As soon as it is, however many samples there are."""
    cut = tmp_path / "cut.tar"
    cut.write_bytes(Path(shard).read_bytes()[:-2000])
    done = run_wds("show", "--out", tmp_path / "s.jpg", "--size", "30000", "--columns", "1", shard, cut)
    assert done.status == 2
    assert "too large: draw fewer or smaller images: see --count, --columns and --size" in done.err
    assert sorted(each.name for each in tmp_path.iterdir()) == ["cut.tar", "x.tar"]


@pytest.mark.parametrize("options", [["--out", "s.gif"], ["--out", "sheet"], ["--out", "s.png", "--size", "0"]])
def test_show_refuses_when_its_arguments_are_wrong(options: list[str], shard: str) -> None:
    """Status 2, and what is valid."""
    done = run_wds("show", *options, shard)
    assert done.status == 2
    assert ".png" in done.err or "--size" in done.err


# ------------------------------------------------------------------------------------------------------------ pages
def test_show_writes_a_page_when_the_name_says_so(shard: str, tmp_path: Path) -> None:
    """One file with all samples, their images as thumbnails."""
    path = tmp_path / "page.html"
    done = run_wds("show", "--out", path, "--size", "16", shard)
    assert (done.status, done.text, done.err) == (0, "", "")
    images = images_of(path)
    assert [image["alt"] for image in images] == [f"s{number:05d}.jpg" for number in range(12)]
    assert all((image["src"] or "").startswith("data:image/jpeg;base64,") for image in images)
    assert {max(int(image["width"] or 0), int(image["height"] or 0)) for image in images} == {16}
    assert "&quot;number&quot;: 11" in path.read_text()


EVIL = "</td><script>alert(1)</script>\" onload='x' &lt;\x1b[2J\u202e"
VOID = {"meta", "img"}


class Reader(HTMLParser):
    """Checks that tags are balanced, and collects them and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def page_of(*samples: SampleSummary, title: str = "title") -> Reader:
    return Reader("".join(write_page(samples, title)))


def picture(mode: str = "RGB") -> Image.Image:
    return Image.new(mode, (8, 6))


def test_page_has_keys_fields_and_pictures_when_written() -> None:
    """A section for each sample, an image for each picture, a row for each field."""
    fields = [FieldSummary("jpg", 1234, "JPEG image", False, True, picture()), FieldSummary("cls", 1, "7")]
    page = page_of(SampleSummary("a", "x.tar", fields), SampleSummary("b", "y.tar", fields[1:]))
    names = [tag for tag, _ in page.tags]
    assert (names.count("section"), names.count("img"), names.count("tr")) == (2, 1, 3)
    assert {"title", "a", "b", "x.tar", "y.tar", "jpg", "1,234 B", "JPEG image", "7"} <= set(page.texts)
    (image,) = (attributes for tag, attributes in page.tags if tag == "img")
    assert (image["width"], image["height"], image["alt"]) == ("8", "6", "a.jpg")


def test_page_escapes_when_names_and_values_are_evil() -> None:
    """They are text, wherever they stand."""
    fields = [FieldSummary(EVIL, 1, EVIL, True, True, picture("RGBA"))]
    page = page_of(SampleSummary(EVIL, EVIL, fields), title=EVIL)
    names = {tag for tag, _ in page.tags}
    assert "script" not in names
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    shown = EVIL.replace("\x1b", r"\x1b").replace("\u202e", r"\u202e")
    assert page.texts.count(shown) == 7  # title, heading, key, shard, caption, name, value
    assert any(attributes.get("alt") == f"{shown}.{shown}" for _, attributes in page.tags)


def test_page_loads_and_runs_nothing_when_opened() -> None:
    """Every address in it is data, and a policy forbids the rest."""
    page = page_of(SampleSummary("a", "x", [FieldSummary("png", 1, "x", False, True, picture("RGBA"))]))
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "iframe", "object", "embed")
        for name in ("src", "href", "action"):
            assert (attributes.get(name) or "data:").startswith("data:")
    (policy,) = (found["content"] for _, found in page.tags if "http-equiv" in found)
    assert policy is not None
    assert policy.startswith("default-src 'none'; img-src data:")
    assert not re.search(r"url\(|@import", "".join(page.texts))


def test_damage_is_marked_when_a_field_does_not_decode() -> None:
    """In another colour."""
    page = page_of(SampleSummary("a", "x", [FieldSummary("jpg", 1, "cut", True, True)]))
    assert ("td", {"class": "value damaged"}) in page.tags


def test_page_is_whole_when_there_is_no_sample() -> None:
    """An empty page is a page."""
    assert "main" in [tag for tag, _ in page_of().tags]

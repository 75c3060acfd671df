"""Pages of samples: whole, harmless, and complete in themselves."""

import re
from html.parser import HTMLParser

from PIL import Image

from torchdata_wds.cli.show import SampleSummary, write_page
from torchdata_wds.cli.show.summaries import FieldSummary

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

"""The web page of ``stats``, and how a browser shows it."""

import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.cli.stats.test_stats import members
from tests.kits.shards import write_tar, write_text_shards
from tests.kits.tool_kit import run_wds

HOSTILE = "<script>alert(1)</script>"
CHROMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
LIGHT = (0xFF, 0xFF, 0xFF), (0x2F, 0x74, 0xC8)  # paper and bars
DARK = (0x16, 0x18, 0x1B), (0x6A, 0xA6, 0xF0)


class Page(HTMLParser):
    """The elements of a page, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(folder: Path, *shards: str) -> str:
    """The page that the command writes."""
    path = folder / "stats.html"
    done = run_wds("stats", "--out", path, "--force", "--on-reappearing", "allow", *shards)
    assert (done.status, done.out) == (0, b""), done.err
    return path.read_text(encoding="utf-8")


@pytest.fixture
def shard(tmp_path: Path) -> str:
    """A shard with images, labels, duplicates and oddities, and markup in every name and value."""
    hostile = [(f"k{number}.{HOSTILE.replace('/', '')}", HOSTILE.encode()) for number in range(4)]
    return write_tar(tmp_path / "<b>&amp;.tar", [*members(), *members(), *hostile, (f"{HOSTILE}x.cls", b"1")])


def test_page_has_charts_and_figures_without_scripts(tmp_path: Path, shard: str) -> None:
    """Everything in one file, nothing that runs or loads, all text escaped."""
    text = page_of(tmp_path, shard)
    page = Page(text)
    assert text.count("Content-Security-Policy") == 1
    assert not {"script", "link", "iframe", "object", "base", "b"}.intersection(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "href")]
    assert page.tags.count("svg") > 10
    headings = ("Fields", "Sizes in bytes", "Images: jpg", "Labels", "Duplicates", "Oddities", "Shards")
    assert [text.find(f"<h2>{heading}</h2>") for heading in headings] == sorted(
        text.find(f"<h2>{heading}</h2>") for heading in headings
    )
    for words in (HOSTILE, "<b>&amp;.tar", "17 samples repeat all content", "2 samples have an empty npy (0 bytes)"):
        assert words in page.text
    assert "16 x 12" in page.text
    assert page.tags.count("section") == text.count("</section>")


def test_page_leaves_out_what_would_be_too_long(tmp_path: Path) -> None:
    """And says how much: of thousands of fields, the first 200."""
    path = write_tar(tmp_path / "x.tar", [(f"k{number:04d}.f{number:04d}", b"1") for number in range(1000)])
    text = page_of(tmp_path, path)
    assert "and 800 more fields" in text
    assert "980 more fields are in fewer than half of the samples" in text
    assert len(text) < 200_000


def test_axis_has_each_label_once(tmp_path: Path) -> None:
    """Although several of its bars begin at sizes that are written alike."""
    path = write_tar(tmp_path / "x.tar", [(f"{number:03d}.bin", b"1" * (4210 + number)) for number in range(300)])
    labels = re.findall(r'text-anchor="\w+">([^<]*)<', page_of(tmp_path, path))
    assert len(labels) > 2
    assert len(set(labels)) == len(labels)


def test_page_of_nothing_is_a_page(tmp_path: Path) -> None:
    """With the counts, and the empty shard as an oddity."""
    page = Page(page_of(tmp_path, *write_text_shards(tmp_path, (0,))))
    assert "samples0shards1" in page.text
    assert "1 shard has no samples" in page.text


def test_page_is_refused_when_its_name_is_not_one_of_a_page(tmp_path: Path) -> None:
    """Before anything is read."""
    done = run_wds("stats", "--out", tmp_path / "x.png", "missing.tar")
    assert (done.status, "ends in .html" in done.err) == (2, True)


# ------------------------------------------------------------------------------------------------------------- browser
def find_browser(names: tuple[str, ...]) -> str:
    """The first of the programs that is installed."""
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser to draw the page: none of {', '.join(names)} is installed")
    return found


def chromium(picture: Path, width: int, *, is_dark: bool) -> list[str]:
    """The command that draws a page with a browser of Chromium's family, and logs what it refuses."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    options += [f"--blink-settings=preferredColorScheme={int(not is_dark)}", f"--window-size={width},1600"]
    options += [f"--user-data-dir={picture.parent / 'chromium'}", f"--screenshot={picture}"]
    return [find_browser(CHROMES), *options]


def firefox(picture: Path, width: int, *, is_dark: bool) -> list[str]:
    """The same with Firefox, whose settings are in its profile."""
    profile = picture.parent / "firefox"
    profile.mkdir(exist_ok=True)
    (profile / "user.js").write_text(f'user_pref("ui.systemUsesDarkTheme", {int(is_dark)});\n')
    options = ["--headless", "--no-remote", "--profile", str(profile), f"--window-size={width},1600"]
    return [find_browser(("firefox", "firefox-esr")), *options, "--screenshot", str(picture)]


@pytest.mark.slow
@pytest.mark.parametrize("browser", [chromium, firefox])
@pytest.mark.parametrize(("width", "is_dark"), [(1200, False), (500, True)])
def test_page_is_drawn_by_a_browser(
    tmp_path: Path, shard: str, browser: Callable[..., list[str]], width: int, is_dark: bool
) -> None:
    """Bars in the colours of a light and of a dark screen, wide and narrow, and nothing beyond the margin."""
    picture = tmp_path / "page.png"
    command = browser(picture, width, is_dark=is_dark)
    page_of(tmp_path, shard)
    page = (tmp_path / "stats.html").as_uri()
    done = subprocess.run([*command, page], capture_output=True, text=True, timeout=300, check=False)
    assert picture.exists(), done.stderr
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line or "Refused" in line]
    with Image.open(picture) as image:
        pixels = np.asarray(image.convert("RGB"))
    paper, accent = DARK if is_dark else LIGHT
    assert pixels.shape[1] == width
    assert (pixels == paper).all(axis=2).mean() > 0.6
    assert (pixels == accent).all(axis=2).sum() > 2000
    assert (pixels[:, :12] == paper).all()
    assert (pixels[:, -12:] == paper).all()

"""Pages of HTML with charts: their SVG parsed, and the page measured in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from xml.etree import ElementTree

import pytest

BROWSER_SECONDS = 60
MEASURE = """
<script>
onload = () => {
  const narrow = document.querySelector("iframe").contentDocument;
  const texts = [...narrow.querySelectorAll("svg text")].map(text => {
    const box = text.getBoundingClientRect();
    const size = parseFloat(getComputedStyle(text).fontSize);
    return [text.textContent, box.left, box.top, box.right, box.bottom, size];
  });
  const root = narrow.documentElement;
  const said = {texts, page: [root.scrollWidth, root.clientWidth]};
  said.paper = getComputedStyle(narrow.body).backgroundColor;
  document.body.textContent = "MEASURED" + JSON.stringify(said) + "END";
};
</script>
"""


def charts(html: str) -> list[ElementTree.Element]:
    """The charts of a page, parsed as XML."""
    found = re.findall(r'<svg class="chart".*?</text></svg>', html, re.DOTALL)
    return [ElementTree.fromstring(each) for each in found]


def measured(page: Path, width: int, dark: bool = False) -> dict:
    """Texts and width of a page in headless Chromium, at so many pixels; skips without Chromium.

    `texts` are [text, left, top, right, bottom, font size] of every label, `page` the width of the
    content and of the window, `paper` the colour of the background.
    """
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("no Chromium: apt install chromium")
    frame = page.with_suffix(".frame.html")
    frame.write_text(f'<iframe src="{page.name}" width="{width}" height="900"></iframe>{MEASURE}')
    theme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    done = subprocess.run(
        [browser, *words, *theme, "--virtual-time-budget=5000", "--dump-dom", frame.as_uri()],
        capture_output=True,
        text=True,
        timeout=BROWSER_SECONDS,
    )
    (said,) = re.findall(r"MEASURED(\{.*?\})END", done.stdout, re.DOTALL) or [done.stderr]
    return json.loads(unescape(said))

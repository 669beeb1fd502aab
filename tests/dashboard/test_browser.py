"""The page in a real browser: Debian's Chromium, driven by Playwright. PAGE_IMAGES=docs/images keeps the pictures."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import shutil
import sqlite3
from collections.abc import Iterator
from typing import Any

import pytest
from fake_runs import FakeRun, older
from pages import Page, shown, until

from hora.dashboard import feed as feed_module
from hora.runs.run_directory import DATABASE

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)")

IMAGES = os.environ.get("PAGE_IMAGES")
HOSTILE = "<img src=x onerror=window.pwned=1>"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], headless=True)
        yield browser
        browser.close()


class Browser:
    """Tabs, and what their consoles have complained of."""

    def __init__(self, chromium: Any, page: Page) -> None:
        self._chromium, self._page = chromium, page
        self._contexts: list[Any] = []
        self.complaints: list[str] = []

    def open(self, path: str, width: int = 1280, height: int = 900, **options: Any) -> Any:
        context = self._chromium.new_context(viewport={"width": width, "height": height}, **options)
        self._contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda said: said.type in ("error", "warning") and self.complaints.append(said.text))
        tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        tab.goto(self._page.url + path)
        tab.wait_for_selector("html[data-ready]")
        return tab

    def close(self) -> None:
        for context in self._contexts:
            context.close()


@pytest.fixture
def home(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path


@pytest.fixture
def page(home: pathlib.Path) -> Iterator[Page]:
    with shown(home) as page:
        yield page


@pytest.fixture
def browser(chromium: Any, page: Page) -> Iterator[Browser]:
    browser = Browser(chromium, page)
    yield browser
    browser.close()
    assert browser.complaints == []


@contextlib.contextmanager
def told(home: pathlib.Path, name: str, past: int = 10, **options: Any) -> Iterator[FakeRun]:
    """A run that a thread keeps going."""
    story = FakeRun(home, name, **options)
    for _ in range(past):
        story.go(20, write=False)
    story.write()
    with story.going():
        yield story
    story.end()


def picture(tab: Any, name: str, last: str) -> None:
    """Keep what is seen down to the element `last`, in few colours so that it is small."""
    if IMAGES is None:
        return
    from PIL import Image

    tab.wait_for_timeout(700)
    box, width = tab.locator(last).bounding_box(), tab.viewport_size["width"]
    clip = {"x": 0, "y": 0, "width": width, "height": box["y"] + box["height"] + 12}
    seen = Image.open(io.BytesIO(tab.screenshot(full_page=True, clip=clip))).convert("RGB")
    seen.quantize(256, dither=Image.Dither.NONE).save(pathlib.Path(IMAGES) / name, optimize=True)


def holds(tab: Any, condition: str) -> None:
    """Waits for it; Playwright's own waiting would need eval, which the page forbids."""
    until(lambda: tab.evaluate(condition))


def text(tab: Any, where: str) -> str:
    return str(tab.locator(where).text_content())


def test_a_ring_moves_before_the_eyes_and_names_its_straggler(browser: Browser, home: pathlib.Path) -> None:
    with told(home, "digits", past=32, slow=1, log=("loss", "accuracy", "lr", "grad_norm")):
        tab = browser.open("/runs/digits")
        chart = tab.locator("#main-chart canvas")
        before, seen = int(chart.get_attribute("data-end")), chart.evaluate("canvas => canvas.toDataURL()")
        strip = tab.locator(".strip").first
        strip_seen = strip.evaluate("canvas => canvas.toDataURL()")
        holds(tab, f"Number(document.querySelector('#main-chart canvas').dataset.end) > {before + 20}")
        assert chart.evaluate("canvas => canvas.toDataURL()") != seen
        assert strip.evaluate("canvas => canvas.toDataURL()") != strip_seen
        tab.wait_for_selector(".scene[data-kind=ring] .edge.lit")
        assert tab.locator(".edge.lit").count() == 4
        assert [edge.get_attribute("data-to") for edge in tab.locator(".edge").all()] == ["1", "2", "3", "0"]
        spot = "document.querySelector('.dot').getAttribute('cx')"
        holds(tab, f"{spot} !== '{tab.evaluate(spot)}'")
        tab.wait_for_selector("#banner.shown")
        assert "rank 1 (host a, pid 401) is slow" in text(tab, "#banner")
        assert tab.locator("#banner").get_attribute("role") == "status"
        assert tab.locator("#banner").get_attribute("aria-live") == "polite"
        assert "slow ×" in text(tab, ".node.slow") and tab.locator(".worker.slow").get_attribute("data-rank") == "1"
        assert text(tab, "#state") == "running"
        assert "newest" in chart.get_attribute("aria-label") and chart.get_attribute("role") == "img"
        picture(tab, "page-ring-light.png", "section:has(#workers)")


def test_servers_have_their_load_and_the_staleness_is_shown(browser: Browser, home: pathlib.Path) -> None:
    with told(home, "served", past=32, strategy="ps:mode=async", servers=2):
        tab = browser.open("/runs/served", color_scheme="dark")
        tab.wait_for_selector(".scene[data-kind=ps] .edge.lit")
        assert tab.locator(".edge.loose").count() == 8 and tab.locator(".server .box").count() == 2
        assert "2.4 MB" in text(tab, ".server >> nth=0") and "queue 1" in text(tab, ".server >> nth=1")
        assert tab.locator("#servers tr").count() == 2
        assert "mean lag" in tab.locator("#lags canvas").get_attribute("aria-label")
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 21, 27)"
        picture(tab, "page-ps-dark.png", "#lag-card")


def test_local_rounds_go_on(browser: Browser, home: pathlib.Path) -> None:
    with told(home, "rounds", past=32, strategy="local:every=8", size=6):
        tab = browser.open("/runs/rounds")
        tab.wait_for_selector(".scene[data-kind=rounds]")
        shown_round = tab.locator(".scene .big")
        before = shown_round.text_content()
        holds(tab, f"document.querySelector('.scene .big').textContent !== {before!r}")
        tab.wait_for_selector(".edge.lit", state="attached")
        assert tab.locator(".arc.local").count() == 6
        picture(tab, "page-local.png", "section:has(#workers)")


@pytest.mark.parametrize(
    ("strategy", "kind", "edges"),
    [("ring", "ring", 8), ("star", "star", 7), ("tree", "tree", 7), ("halving", "halving", 12), ("shared", "shared", 8),
     ("engine", "engine", 8), ("auto", "halving", 12)],
)  # fmt: skip
def test_each_architecture_is_drawn_as_it_is(
    browser: Browser, home: pathlib.Path, strategy: str, kind: str, edges: int
) -> None:
    with told(home, "one", strategy=strategy, size=8, algorithm="halving" if strategy == "auto" else ""):
        tab = browser.open("/runs/one")
        tab.wait_for_selector(f".scene[data-kind={kind}][data-lit='{edges}']")
        assert tab.locator(".edge").count() == edges and tab.locator(".node").count() == 8


def test_the_page_stops_when_the_run_ends(browser: Browser, home: pathlib.Path) -> None:
    with told(home, "one"):
        tab = browser.open("/runs/one")
        tab.wait_for_selector(".edge.lit", state="attached")
    tab.wait_for_selector("#state.ended")
    assert tab.locator(".edge.lit").count() == 0 and tab.locator("#main-chart canvas").get_attribute("data-points")
    step = text(tab, "#tiles dd >> nth=0")
    tab.reload()  # the same page, from the database alone
    tab.wait_for_selector("#state.ended")
    assert text(tab, "#tiles dd >> nth=0") == step and "the run has ended" in text(tab, "#events")


def test_a_phone_needs_no_scrolling_sideways(browser: Browser, home: pathlib.Path) -> None:
    older(home, "old")
    with (
        told(home, "digits", past=32, slow=1, log=("loss", "accuracy")),
        told(home, "a-name-that-is-as-long-as-names-may-be-" + "x" * 25, strategy="ps:mode=async", size=16, servers=8),
    ):
        for path in ("/", "/runs/digits", f"/runs/a-name-that-is-as-long-as-names-may-be-{'x' * 25}", "/runs/old",
                     "/compare?runs=digits,old"):  # fmt: skip
            tab = browser.open(path, width=390, height=844)
            tab.wait_for_timeout(300)
            assert tab.evaluate("document.documentElement.scrollWidth") <= 390, path
            if path == "/runs/digits":
                cut = "document.querySelector('.worker.slow .who')"
                assert "slow" in text(tab, ".worker.slow .who")
                assert tab.evaluate(f"{cut}.scrollWidth <= {cut}.clientWidth")
                picture(tab, "page-phone.png", ".scene-card")
            if "xxx" in path:  # the servers' table scrolls inside its card
                wide = "((it) => it.scrollWidth > it.clientWidth)(document.querySelector('#server-card{}'))"
                assert tab.evaluate(wide.format(" .scroll")) and not tab.evaluate(wide.format(""))


def test_the_theme_is_the_systems_until_it_is_chosen(browser: Browser, home: pathlib.Path) -> None:
    with told(home, "one"):
        color = "getComputedStyle(document.body).backgroundColor"
        tab = browser.open("/runs/one", color_scheme="light")
        light = tab.evaluate(color)
        tab.emulate_media(color_scheme="dark")
        dark = tab.evaluate(color)
        assert light != dark
        tab.click("#theme")
        assert tab.evaluate(color) == light
        tab.reload()
        tab.wait_for_selector("html[data-ready]")
        assert tab.evaluate(color) == light  # remembered, though the system is dark


def test_every_control_can_be_reached_and_used_by_keyboard(browser: Browser, home: pathlib.Path) -> None:
    with told(home, "one"):
        tab = browser.open("/runs/one")
        tab.wait_for_selector(".edge.lit", state="attached")
        reached = []
        for _ in range(40):
            tab.keyboard.press("Tab")
            found = tab.evaluate("""() => {
                const it = document.activeElement;
                const style = getComputedStyle(it.matches('.segments input') ? it.nextElementSibling : it);
                return [it.id || it.name || it.className || it.tagName, style.outlineStyle !== 'none'];
            }""")
            if found[0] == "BODY":
                break
            reached.append(found)
        assert {"theme", "x", "log", "smooth", "events", "plot"} <= {name for name, _ in reached}
        assert all(visible for _, visible in reached), reached
        tab.focus("input[name=x]:checked")
        tab.keyboard.press("ArrowRight")
        assert tab.locator("input[name=x]:checked").get_attribute("value") == "samples"
        holds(tab, "document.querySelector('#main-chart canvas').getAttribute('aria-label').includes('over samples')")
        tab.focus("#main-chart canvas")
        tab.keyboard.press("ArrowLeft")
        tab.wait_for_selector("#main-chart .tip:not([hidden])")
        assert "samples" in text(tab, "#main-chart .tip")


def test_everything_has_a_name_for_who_cannot_see_it(browser: Browser, home: pathlib.Path) -> None:
    with told(home, "one", strategy="ps:mode=async", servers=2):
        tab = browser.open("/runs/one")
        tab.wait_for_selector(".edge.lit", state="attached")
        nameless = tab.evaluate("""() => [...document.querySelectorAll('[role=img], button, input, textarea, select')]
            .filter((it) => !it.closest('[hidden]') && it.getClientRects().length)
            .filter((it) => !(it.getAttribute('aria-label') || it.textContent.trim() || it.labels?.length))
            .map((it) => it.outerHTML)""")
        assert nameless == []
        assert tab.evaluate("document.documentElement.lang") == "en" and tab.locator("h1").count() == 1


def test_who_wants_no_motion_gets_none(browser: Browser, home: pathlib.Path) -> None:
    with told(home, "one", slow=0):
        tab = browser.open("/runs/one", reduced_motion="reduce")
        tab.wait_for_selector(".edge.lit", state="attached")
        tab.wait_for_selector(".dots.still", state="attached")
        assert tab.evaluate("getComputedStyle(document.querySelector('.dots')).display") == "none"
        assert tab.evaluate("document.getAnimations().length") == 0


def test_names_out_of_user_code_are_text(browser: Browser, home: pathlib.Path) -> None:
    with told(home, "one", log=("loss", HOSTILE[:60]), strategy=f"ring:{HOSTILE}", algorithm=HOSTILE) as story:
        story.event("died", HOSTILE, HOSTILE)
        story.event(HOSTILE, HOSTILE, "</script><script>window.pwned=1</script>")
        tab = browser.open("/runs/one")
        tab.wait_for_selector(".event")
        holds(tab, "document.querySelectorAll('.event').length >= 6")
        assert HOSTILE in text(tab, "#events") and "<img src=x" in text(tab, "#small-charts")
        tab.goto(tab.url.replace("/runs/one", "/"))
        tab.wait_for_selector("#runs tr")
        assert tab.evaluate("window.pwned") is None and tab.locator("img[src=x]").count() == 0
        tab.goto(tab.url + "compare?runs=one,%3Cimg%20src=x%20onerror=window.pwned=1%3E")
        tab.wait_for_selector("html[data-ready]")
        assert tab.evaluate("window.pwned") is None and tab.locator("img[src=x]").count() == 0
        browser.complaints[:] = [one for one in browser.complaints if "404" not in one]  # there is no such run


def test_events_say_whom_they_befell(browser: Browser, home: pathlib.Path) -> None:
    story = FakeRun(home, "one", size=2)
    story.event("died", "rank 1 (host a, pid 401)", "killed by SIGKILL")
    story.event("left", "rank 0 (host a, pid 400)", "")
    story.event("checkpoint", "rank 0", "step-20 was written")
    story.end()
    tab = browser.open("/runs/one")
    told = [event.text_content() for event in tab.locator(".event .text").all()]
    assert told == ["the run has ended with code 0", "step-20 was written", "rank 0 (host a, pid 400)",
                    "rank 1 (host a, pid 401): killed by SIGKILL", "rank 1 (host a, pid 401)",
                    "rank 0 (host a, pid 400)"]  # fmt: skip


def test_a_page_without_its_server_says_so_until_it_is_back(chromium: Any, home: pathlib.Path) -> None:
    with told(home, "one", past=25, slow=1):
        with shown(home) as page:
            browser = Browser(chromium, page)
            tab = browser.open("/runs/one")
            tab.wait_for_selector(".edge.lit", state="attached")
            tab.wait_for_selector("#banner.shown")
            holds(tab, "document.querySelector('#tiles').textContent.includes('to go')")
        tab.wait_for_selector("#state.unknown")
        assert text(tab, "#state") == "not connected" and tab.locator("#link").is_visible()
        assert "to go" not in text(tab, "#tiles") and "last heard of" in text(tab, "#tiles")
        assert tab.locator(".edge.lit").count() == 0 and not tab.locator("#banner").is_visible()
        with shown(home, port=page.port):
            tab.wait_for_selector("#state.running")
            tab.wait_for_selector(".edge.lit", state="attached")
            assert not tab.locator("#link").is_visible() and tab.locator("#banner").is_visible()
        browser.close()


def test_epochs_are_counted_from_one(browser: Browser, home: pathlib.Path) -> None:
    story = FakeRun(home, "one")
    story.go(20)  # in the epoch that its report calls 1: the second
    story.end()
    assert "epoch 2 of 5" in text(browser.open("/runs/one"), "#tiles")


def test_an_axis_holds_what_it_shows(browser: Browser, home: pathlib.Path) -> None:
    FakeRun(home, "one").end()
    tab = browser.open("/runs/one")
    axes = "import('/static/axes.js').then((axes) => axes.range"
    assert tab.evaluate(f"{axes}(0, 0, false))") == tab.evaluate(f"{axes}(0, 0, true))") == [0, 1]
    low, high = tab.evaluate(f"{axes}(-2, -2, false))")
    assert low < -2 < high < 0
    sort = "import('/static/chart.js').then((chart) => chart.ordered({}, (point) => point[0]))"
    assert tab.evaluate(sort.format("[[1, 5], [3, 6], [2, 7]]")) == [[1, 5], [2, 7], [3, 6]]


def test_how_it_ended_is_told_in_words(browser: Browser, home: pathlib.Path) -> None:
    rows = [{"up_to_bytes": 2896, "algorithm": "star"}, {"up_to_bytes": 20000, "algorithm": "star"},
            {"up_to_bytes": None, "algorithm": "halving"}]  # fmt: skip
    older(home, "one", lost=["rank 1 died", "rank 2 died"], auto={"auto/g1/0": json.dumps({"rows": rows}), "b": "{"})
    tab = browser.open("/runs/one")
    told = {
        row.locator("dt").text_content(): row.locator("dd").inner_text() for row in tab.locator(".config div").all()
    }
    assert told["ended.lost"].splitlines() == ["rank 1 died", "rank 2 died"]
    assert told["ended.auto"] == "star up to 20 kB, then halving" and not any("auto/" in key for key in told)


def test_runs_are_chosen_and_compared(browser: Browser, home: pathlib.Path) -> None:
    for seed, (name, strategy, fast) in enumerate(
        [("ring-4", "ring", 0.05), ("ps-sync", "ps:mode=sync", 0.07), ("local-8", "local:every=8", 0.035)]
    ):
        story = FakeRun(home, name, strategy=strategy, servers=2 if "ps" in strategy else 0, seed=seed)
        for number in range(60):
            story.go(20, step_s=fast * (1 + 0.1 * (number % 2)), write=False)
        story.end()
    tab = browser.open("/")
    assert tab.locator("#runs tr").count() == 3 and tab.locator("#go").is_disabled()
    tab.fill("#find", "sync")
    holds(tab, "document.querySelectorAll('#runs tr').length === 1")
    tab.fill("#find", "")
    for box in tab.locator("#runs input[type=checkbox]").all()[:2]:
        box.check()
    tab.click("#go")
    tab.wait_for_selector("html[data-ready]")
    tab.wait_for_selector("#table thead a >> nth=1")
    tab.locator("#others-box summary").click()
    tab.locator("#others input").first.check()
    holds(tab, "document.querySelectorAll('#table thead a').length === 3")
    tab.locator("#others-box summary").click()
    titles = [one.text_content() for one in tab.locator("#charts h3 > span:first-child").all()]
    assert titles == ["loss over samples", "loss over time", "accuracy over samples", "accuracy over time"]
    label = tab.locator("#charts canvas").first.get_attribute("aria-label")
    assert all(name in label for name in ("ring-4", "ps-sync", "local-8"))
    tab.check("#smooth")
    picture(tab, "compare.png", "section:has(#table)")


def test_a_predictor_can_be_tried(browser: Browser, home: pathlib.Path, page: Page) -> None:
    import http.server
    import threading

    from test_predict import Answers

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with told(home, "one", serving=f"http://127.0.0.1:{server.server_port}"):
            tab = browser.open("/runs/one")
            holds(tab, "document.querySelector('#predict-state').textContent.includes('step 7')")
            assert tab.input_value("#predict-body") == "[[0,0]]"  # from the signature
            tab.fill("#predict-body", "[[3, 4]]")
            tab.click("#predict-button")
            holds(tab, "document.querySelector('#predict-answer').textContent.includes('[[3,4]]')")
            tab.fill("#predict-body", "[[3, 4")
            tab.click("#predict-button")
            tab.wait_for_selector(".answer.bad")
            assert "not JSON" in text(tab, "#predict-answer")
        holds(tab, "document.querySelector('#predict-state').textContent.includes('its predictor with it')")
        assert not tab.locator("#predict-form").is_visible()
        with told(home, "loose", serving=f"http://127.0.0.1:{server.server_port}", strategy="ps:mode=ssp", servers=1):
            tab = browser.open("/runs/loose")
            holds(tab, "document.querySelector('#predict-state').textContent.includes('of update 7')")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_run_of_another_version_says_the_way_out(browser: Browser, home: pathlib.Path) -> None:
    FakeRun(home, "one").end()
    with sqlite3.connect(home / "one" / DATABASE) as database:
        database.execute("PRAGMA user_version = 7")
    tab = browser.open("/")
    assert "written by another version of Hora" in text(tab, "#runs")
    tab.click("#runs a")
    tab.wait_for_selector("#problem:not([hidden])")
    assert "open it with that version, or delete the directory" in text(tab, "#problem")


def test_where_no_stream_is_to_be_had_the_page_asks(
    browser: Browser, home: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "MAX_STREAMS", 0)
    with told(home, "one"):
        tab = browser.open("/runs/one")
        end = "Number(document.querySelector('#main-chart canvas').dataset.end)"
        holds(tab, f"{end} > {tab.evaluate(end)}")
        assert until(lambda: browser.complaints)
    browser.complaints[:] = [one for one in browser.complaints if "503" not in one]  # which the browser tells of itself

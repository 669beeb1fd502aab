"""Takes the pictures of the page in this folder from runs of seen.py: python docs/images/shots.py [NAME…].

Needs Debian's chromium and the playwright package; takes a few minutes.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any

from playwright.sync_api import sync_playwright

HERE = pathlib.Path(__file__).parent
LIVE = {  # name, flags of hora run, arguments, seconds into the training, browser
    "page-ring-light": (["-n", "4", "--strategy", "ring"], ["--slow", "1"], 20, {"color_scheme": "light"}),
    "page-ps-dark": (["-n", "4", "--strategy", "ps:mode=async", "--servers", "2"], [], 14, {"color_scheme": "dark"}),
    "page-local": (["-n", "4", "--strategy", "local:every=16", "--serve", "0"], [], 14, {"color_scheme": "light"}),
    "page-phone": (["-n", "3", "--strategy", "shared"], ["--slow", "2"], 12,
                   {"color_scheme": "light", "viewport": {"width": 390, "height": 844}, "device_scale_factor": 1}),
}  # fmt: skip
COMPARED = {"ring": ["-n", "2", "--strategy", "ring"], "local-16": ["-n", "2", "--strategy", "local:every=16"],
            "ps-async": ["-n", "2", "--strategy", "ps:mode=async", "--servers", "1"]}  # fmt: skip


def start(folder: str, name: str, flags: list[str], arguments: list[str]) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "hora.cli.main", "run", *flags, "--name", name, "--dashboard", "0"]
    script = [str(HERE / "seen.py"), *arguments, "--save", f"{folder}/saved-{name}"]
    env = {**os.environ, "XDG_STATE_HOME": folder, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, *script], env=env, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if match := re.search(r"http://\S+", line):
            return process, match[0]
    raise SystemExit(f"{name} announced no page")


def take(tab: Any, name: str) -> None:
    path = HERE / f"{name}.png"
    tab.screenshot(path=str(path), full_page=True)
    print(path, path.stat().st_size)


def main(wanted: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, (flags, arguments, seconds, options) in LIVE.items():
            if wanted and name not in wanted:
                continue
            process, address = start(folder, name.removeprefix("page-"), flags, arguments)
            tab = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options}).new_page()
            tab.goto(address)
            tab.get_by_text(re.compile("epoch")).first.wait_for(timeout=60_000)
            time.sleep(seconds)
            take(tab, name)
            tab.close()
            process.terminate()
            process.communicate()
        if not wanted or "compare" in wanted:
            for name, flags in COMPARED.items():
                process, _ = start(folder, name, flags, [])
                process.communicate()
            env = {**os.environ, "XDG_STATE_HOME": folder}
            page = subprocess.Popen(
                [sys.executable, "-m", "hora.cli.main", "dashboard", "--port", "8399"],
                env=env,
                stdout=subprocess.PIPE,
            )
            time.sleep(3)
            tab = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
            tab.goto(f"http://127.0.0.1:8399/compare?runs={','.join(COMPARED)}")
            time.sleep(3)
            take(tab, "compare")
            page.terminate()
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1:])

"""Reports of a run whose every free text is hostile: nothing of it is obeyed, wherever it
stands.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.support.pages import sample_results
from tests.support.pages.html_page import Page
from trainchaos.chaos.events.log import EventWriter, Kind
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.judge.results import Results
from trainchaos.reports import html, render_all

HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(1)>\x1b[31m\x07 | `${{x}}` ]]>"
    " \r\n::error::\u202e"
)
RUN, EARLIER = "2026-11-20T18-02-11-17", "2026-11-20T18-02-10-17"
KEPT = ("id", "events", "cell", "scenario")  # by these the parts of a result find each other


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of every text."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield from places(child, (*path, key))
    elif isinstance(value, list):
        for number, child in enumerate(value):
            yield from places(child, (*path, number))
    elif isinstance(value, str):
        yield path


def put(tree: Any, path: tuple[Any, ...], text: str) -> str:
    for step in path[:-1]:
        tree = tree[step]
    before: str = tree[path[-1]]
    tree[path[-1]] = text
    return before


class Tags(HTMLParser):
    """Scripts and images of a page, and attributes that would run something."""

    def __init__(self) -> None:
        super().__init__()
        self.bad: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.bad += [f"{tag} {name}" for name, _ in attrs if name.startswith("on")]
        self.bad += [tag] if tag == "img" else []

    def handle_data(self, data: str) -> None:
        if self.lasttag == "script" and "alert(1)" in data and "<" not in data:
            self.bad.append(data[:40])


def beside(run: RunDirectory, results: Results) -> None:
    """What ranks printed and said in their logs, and an earlier run, all hostile."""
    for arm in results.arms:
        run.logs(arm.id).mkdir(parents=True, exist_ok=True)
        (run.logs(arm.id) / f"{HOSTILE.replace('/', '')}.log").write_text(f"{HOSTILE}\n" * 3)
        writer = EventWriter(run.events(arm.id), "w9", lambda: 5_100_000_000)
        said = {"fault": HOSTILE, "kind": HOSTILE, "occurrence": 0, "target": {HOSTILE: HOSTILE}}
        writer.write(Kind.FAULT_INJECTED, **said, act=0, phase=HOSTILE)
        writer.write(Kind.DECISION, reason=HOSTILE, actions=[HOSTILE])
        writer.write(Kind.CHECKPOINT_COMMITTED, checkpoint=HOSTILE, bytes=1, seconds=1.0)
        writer.close()
    resolved = "cells:\n- id: x\n  id: recovery=hot-spare\n    workload:\n      steps: 1\n"
    earlier = RunDirectory(run.root.parent / EARLIER)
    earlier.root.mkdir()
    earlier.results.write_text(
        results.model_copy(update={"run_id": EARLIER, "started": HOSTILE}).model_dump_json()
    )
    (earlier.root / "report.html").write_text(HOSTILE)
    for each in (run, earlier):
        each.resolved.write_text(resolved)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDirectory, dict[str, Path], int]:
    run, results = sample_results.build(tmp_path_factory.mktemp("runs") / RUN)
    tree = results.model_dump(mode="json")
    spoilt = 0
    kinds: dict[tuple[Any, ...], bool] = {}
    for path in list(places(tree)):
        kind = tuple("#" if isinstance(step, int) else step for step in path)
        if path[-1] in KEPT or kinds.get(kind) is False:
            continue
        before = put(tree, path, HOSTILE)
        if kind not in kinds:  # whether a text may be anything is the same in all places of a kind
            try:
                Results.model_validate(tree)
                kinds[kind] = True
            except ValidationError:
                kinds[kind] = False
        if kinds[kind]:
            spoilt += 1
        else:
            put(tree, path, before)
    hostile = Results.model_validate(tree)
    beside(run, hostile)
    with pytest.MonkeyPatch.context() as fewer:  # of several plots of a kind one has all texts
        fewer.setattr(html, "MAX_PLOTTED_CELLS", 1)
        paths = render_all(run, hostile)
    return run, {path.suffix: path for path in paths}, spoilt


@pytest.mark.slow
def test_hostile_text_in_every_place_stays_text(
    written: tuple[RunDirectory, dict[str, Path], int],
) -> None:
    run, paths, spoilt = written
    assert spoilt > 20
    tags = Tags()
    page = paths[".html"].read_text()
    tags.feed(page)
    assert tags.bad == []
    for part in ("fault injected: &lt;script", "<li><code>&lt;script", f"../{EARLIER}/report.html"):
        assert part in page, "this test shows something"
    assert not [one for one in Page(page).addresses if ":" in one and one != "data:,"]
    fenced = re.sub(r"(?ms)^```sh$.*?^```$", "", paths[".md"].read_text())
    assert "<img" not in fenced.replace("\\<", "") and "```" not in fenced
    ElementTree.fromstring(paths[".xml"].read_bytes())
    for path in paths.values():
        text = path.read_text()
        assert "\x1b" not in text and "\x07" not in text, path.name
        assert path.parent == run.root, "nothing is written elsewhere"

"""Reads the scripts of a command: what they train with (the table is
``chaos.scenario.frameworks``), which variables and options they have, how many steps they do.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from trainchaos.chaos.scenario.frameworks import FRAMEWORKS, Framework
from trainchaos.harness.draft import arguments

MOST_TEXT = 1 << 20  # bytes read of a script
MOST_SCRIPTS = 8
GROUP = next(one.group for one in FRAMEWORKS if one.group)
"""Variable that names replica groups, also where the framework is not recognised."""
_PLACE = r"\w*(?:CKPT|CHECKPOINT|SAVE|OUTPUT|STORAGE)\w*"
PLACE = re.compile(
    rf"(?:environ(?:\.get\(|\[)|getenv\()\s*['\"](?P<python>{_PLACE})['\"]"
    rf"|\$\{{(?P<shell>{_PLACE}|(?:\w+_)?(?:OUT|RUN)(?:_?DIR)?):?[-=]"
)
"""A variable from which a script, or a script of a shell, reads where its checkpoints go."""
_NO_PLACE = re.compile(r"EVERY|INTERVAL|STEPS|FREQ|KEEP|LIMIT|LEVEL")
_READ = re.compile(
    r"(?:environ\.get|getenv)\(\s*['\"](\w+)['\"]\s*,\s*['\"]([^'\"\n]+)['\"]"
    r"|\$\{(\w+):?[-=]([^}\s]+)\}"
)
"""A variable with a default."""
_OPTION = re.compile(
    r"(?:add_argument|option)\(\s*(?:['\"]-\w['\"],\s*)?['\"](?P<name>--[\w.-]+)['\"]"
    r"(?P<rest>(?:[^()]|\([^()]*\))*)\)"
)
"""An option that a script declares to argparse or click."""
_DEFAULT = re.compile(r"\bdefault\s*=\s*(?:(?:\w+\.)?Path\()?(?:['\"]([^'\"]*)['\"]|(\d[\d_]*))")
_GLOBAL = re.compile(r"(?m)^([a-z]\w*)\s*=\s*(?:['\"]([^'\"\n]*)['\"]|(\d[\d_]*))\s*(?:#.*)?$")
"""A variable that nanoGPT's configurator.py makes an option."""
_NAMES = re.compile(r"[^\s'\"=;|&<>()]+\.(?:py|sh)(?![\w.])")
"""Scripts in a word of a command, which may be a line for a shell."""
_TOTAL = re.compile(
    r"(?m)(?:^\s*|[(,{]\s*['\"]?)(?:max_|num_|total_|n_)?(?:train_)?(?:steps|iters|iterations)"
    r"(?:\s*(?::\s*int\s*)?=\s*|['\"]:\s*)"
    r"(?P<call>int\()?[^\n\d]{0,60}?(?P<number>\d{1,12})\b",
    re.IGNORECASE,
)
_RANGE = re.compile(r"\bfor (?:\w*step\w*|it|iter\w*) in range\((?:(\d{1,12}),\s*)?(\d{1,12})\)")


@dataclass(frozen=True, kw_only=True)
class ScriptText:
    """The scripts that a command names. ``name``: of the first; empty if there is none."""

    name: str = ""
    text: str = ""

    @property
    def place_variables(self) -> list[str]:
        """Variables from which they read where checkpoints go."""
        found = (one["python"] or one["shell"] for one in PLACE.finditer(self.text))
        return [name for name in dict.fromkeys(found) if not _NO_PLACE.search(name)]

    @property
    def defaults(self) -> dict[str, str]:
        """Variables that they read -> the default."""
        return {one[1] or one[3]: one[2] or one[4] for one in _READ.finditer(self.text)}

    @property
    def options(self) -> dict[str, str]:
        """Options that they declare, as they are written in front of a value -> the default."""
        found = {}
        for one in _OPTION.finditer(self.text):
            if default := _DEFAULT.search(one["rest"]):
                found[f"{one['name']} "] = default[1] or default[2] or ""
        if re.search(r"\bconfigurator\b", self.text):
            found |= {f"--{one[1]}=": one[2] or one[3] or "" for one in _GLOBAL.finditer(self.text)}
        if re.search(r"(?m)^\s*(?:import|from)\s+hydra\b", self.text):
            found["hydra.run.dir="] = "outputs"
        return found

    @property
    def resume(self) -> str:
        """The words that have it go on from a checkpoint; "" if it has no such option, or if
        nothing says with which value.
        """
        for one in _OPTION.finditer(self.text):
            if arguments.among(one["name"], arguments.RESUME):
                if "store_true" in one["rest"]:
                    return str(one["name"])
                if value := self._latest(one["name"]):
                    return f"{one['name']} {value}"
        for head in self.options:
            value = self._latest(head.strip("-= "))
            if head.endswith("=") and value and arguments.among(head, arguments.RESUME):
                return head + value
        return ""

    def _latest(self, option: str) -> str:
        """The word with which a script compares the option's value, if it says to go on."""
        name = option.lstrip("-").replace("-", "_")
        found = re.search(rf"\b{name}\s*==\s*['\"](resume|latest|last|auto)['\"]", self.text)
        return found[1] if found else ""

    @property
    def steps_guess(self) -> tuple[int, str] | None:
        """A number that looks like the number of steps, and the line that says so, or the option
        whose default it is; None if there is none, or if there are several.
        """
        found = {int(one["number"]): one[0].strip(" ,({\n") for one in _TOTAL.finditer(self.text)}
        found |= {int(one[2]) - int(one[1] or 0): one[0] for one in _RANGE.finditer(self.text)}
        option = arguments.declared(self.options, arguments.STEPS)
        if not found and option is not None and option.value.isdigit():
            found = {int(option.value): f"the default of {option.name}"}
        return next(iter(found.items())) if len(found) == 1 else None


def read_scripts(words: Sequence[str], directory: Path) -> ScriptText:
    """The text of the scripts among a command's words, and of ``-m module`` below its directory."""
    paths = [directory / name for word in words for name in _names(word)]
    for flag, module in pairwise(words):
        if flag in ("-m", "--module") and re.fullmatch(r"[\w.]+", module):
            stem = directory / module.replace(".", "/")
            paths += [stem.with_suffix(".py"), stem / "__main__.py"]
    texts, name = list[str](), ""
    for path in dict.fromkeys(paths):
        try:
            if not path.is_file() or len(texts) == MOST_SCRIPTS:
                continue
            with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
                texts.append(stream.read(MOST_TEXT).decode(errors="replace"))
        except OSError:  # not readable, or too long for a name: a line for a shell
            continue
        name = name or (path.parent.name if path.name == "__main__.py" else path.stem)
    return ScriptText(name=name, text="\n".join(texts))


def _names(word: str) -> list[str]:
    """Names of scripts in a word: the word itself, what an option says, or words for a shell."""
    try:
        inner = shlex.split(word)
    except ValueError:  # not all words are a line for a shell
        inner = []
    whole = [one for one in (word, word.partition("=")[2], *inner) if one.endswith((".py", ".sh"))]
    return list(dict.fromkeys([*whole, *_NAMES.findall(word)]))


def recognise(words: Sequence[str], script: ScriptText) -> list[Framework]:
    """All frameworks that the script or its command shows."""
    joined = " ".join(words)
    return [one for one in FRAMEWORKS if one.shown_by(script.text, joined)]

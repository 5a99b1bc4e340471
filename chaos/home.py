"""Where this program's own files are: its packages, and the scenarios, examples, templates and
pinned versions that come with them. ``python -m trainchaos.chaos.home`` prints the place.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import trainchaos
from trainchaos.chaos.errors import InfrastructureError

HOME = Path(__file__).resolve().parents[1]
"""The folder of the four packages: the top of a checkout, or ``site-packages/trainchaos``."""


def cache() -> Path:
    """The directory for what can be made again: ``trainchaos`` in ``$XDG_CACHE_HOME``, else in
    ``~/.cache``. It need not exist.
    """
    told = os.environ.get("XDG_CACHE_HOME")
    return (Path(told) if told else Path.home() / ".cache") / "trainchaos"


def import_root() -> Path:
    """A directory from which the Python of another environment imports ``trainchaos``.

    Of an installation it is not site-packages, where that Python would find this environment's
    torch before its own, but a directory with a link to the one package. Raises
    InfrastructureError if that cannot be made.
    """
    package = Path(trainchaos.__path__[0])
    if package.parent == HOME:
        return HOME
    place = cache() / "import" / hashlib.sha256(os.fsencode(package)).hexdigest()[:12]
    link = place / package.name
    try:
        place.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(package, target_is_directory=True)
    except FileExistsError:  # another process was faster
        pass
    except OSError as error:
        raise InfrastructureError(f"{link} cannot be made: {error.strerror}") from error
    return place


if __name__ == "__main__":  # a pipeline asks where constraints.txt is, before anything is installed
    print(HOME)

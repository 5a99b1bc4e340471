"""Images for the containers of a run: an image of the user's, or one made here without a registry.

The latter is almost empty: this machine's /usr, its Python and the packages of this process are
bound read-only into each container, at the same paths. So the nodes run exactly the harness's
software.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pwd
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import trainchaos
from trainchaos.chaos import plugins
from trainchaos.chaos.errors import InfrastructureError
from trainchaos.harness.host.container_engine import IMAGE_LABEL, asking

REPOSITORY = "trainchaos-host"
PROBE_LIMIT_S = 60
SAME = ("trainchaos", "torch")
_LINKED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_EMPTY = ("dev", "etc", "home", "proc", "root", "run", "sys", "usr", "var")
_SHARED = ("tmp", "var/tmp")
_ETC = ("ld.so.cache", "alternatives", "ssl", "localtime")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PROBE = (
    "import json, sys\n"
    "from importlib import metadata\n"
    "found = {'python': '%d.%d' % sys.version_info[:2]}\n"
    f"for name in {SAME!r}:\n"
    "    try:\n"
    "        found[name] = metadata.version(name)\n"
    "    except metadata.PackageNotFoundError:\n"
    "        found[name] = ''\n"
    "print(json.dumps(found))\n"
)


@dataclass(frozen=True, kw_only=True)
class Image:
    """``id``: the image's id; ``python``: the program that runs our code in it; ``binds``:
    directories of this machine that each container has at the same path, read-only.
    """

    id: str
    python: str
    binds: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def host_image(client: Any) -> Image:
    """The image made without a registry; made once, and then found by its content. Raises
    InfrastructureError.
    """
    content = skeleton()
    tag = hashlib.sha256(content).hexdigest()[:16]
    with asking("look for the image of this machine"):
        found = client.images.list(name=f"{REPOSITORY}:{tag}")
    if not found:
        with asking("import an image of this machine"):
            client.api.import_image_from_data(
                content, repository=REPOSITORY, tag=tag, changes=[f"LABEL {IMAGE_LABEL}={tag}"]
            )
            found = [client.images.get(f"{REPOSITORY}:{tag}")]
    return Image(
        id=str(found[0].id),
        python=sys.executable,
        binds=software(interpreter_places()),
        environment={
            "PATH": _PATH,
            "HOME": "/tmp",
            "LANG": "C.UTF-8",
            "PYTHONPATH": os.pathsep.join(import_path(sys.path)),
            plugins.DIRECTORIES: os.pathsep.join(map(str, plugins.directories())),
        },
    )


def user_image(
    client: Any, name: str, python: str, *, mounts: Sequence[str], labels: Mapping[str, str]
) -> Image:
    """An image that the user names; its Python may be in one of the ``mounts``. Raises
    InfrastructureError if the image is not here, lacks Python or our package, or has another torch.
    ``labels``: of the container that checks this.
    """
    from docker.errors import ImageNotFound

    with asking(f"look for the image {name}"):
        try:
            image = client.images.get(name)
        except ImageNotFound as error:
            raise InfrastructureError(
                f"the image {name} is not on this machine",
                hint=(
                    f"docker pull {name}, or omit the parameter image: the nodes then run this"
                    " machine's Python"
                ),
            ) from error
    refuse_different(name, _versions(client, image, name, python, mounts, labels))
    return Image(id=str(image.id), python=python)


def bound(places: Sequence[str]) -> dict[str, dict[str, str]]:
    """Volumes of a container, in the engine's format: directories of this machine at the same path,
    read-only.
    """
    return {place: {"bind": place, "mode": "ro"} for place in places}


def refuse_different(name: str, found: Mapping[str, str]) -> None:
    """Raise InfrastructureError if the image's versions (package -> version, "": missing) differ
    from those of this process.
    """
    ours = {package: metadata.version(package) for package in SAME}
    for package, here in ours.items():
        there = found.get(package, "")
        if _public(there) != _public(here):
            has = f"{package} {there}" if there else f"no {package}"
            raise InfrastructureError(
                f"the image {name} has {has}, and this harness runs with {here}",
                hint=(
                    f"build it with {package}=={_public(here)}, or run chaos from an environment"
                    "with the versions that it has"
                ),
            )


def skeleton() -> bytes:
    """The almost empty image, as a reproducible tar archive."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, mode in [
            *((name, 0o755) for name in _EMPTY),
            *((name, 0o1777) for name in _SHARED),
        ]:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            tar.addfile(entry)
        for name in _LINKED:
            entry = tarfile.TarInfo(name)
            if (Path("/") / name).is_symlink():
                entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(f"/{name}").lstrip("/")
                tar.addfile(entry)
            elif (Path("/") / name).is_dir():
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(entry)
        for name, text in _accounts().items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(text), 0o644
            tar.addfile(entry, io.BytesIO(text))
    return stream.getvalue()


def software(places: Iterable[str]) -> list[str]:
    """Those of the ``places`` that are directories, and the system's own; none is inside another.
    One that is reached through a link, such as an environment that several checkouts share, is
    there under both names.
    """
    system = [
        "/usr",
        *(
            f"/{name}"
            for name in _LINKED
            if os.path.isdir(f"/{name}") and not os.path.islink(f"/{name}")
        ),
    ]
    system += [f"/etc/{name}" for name in _ETC if Path("/etc", name).exists()]
    there = [place for place in places if os.path.isdir(place)]
    named = {*map(os.path.abspath, there), *map(os.path.realpath, there)}
    found: list[str] = []
    for path in sorted(named | set(system)):
        if path != "/" and not any(
            path == other or path.startswith(f"{other}/") for other in found
        ):
            found.append(path)
    return found


def interpreter_places() -> Iterator[str]:
    """Prefixes, the import path, and the directory of our own packages (elsewhere if they are
    editable).
    """
    yield from (sys.prefix, sys.base_prefix, os.path.dirname(os.path.realpath(sys.executable)))
    yield from (place for place in sys.path if place)
    yield from (str(_where_we_are()), *map(str, plugins.directories()))


def _where_we_are() -> Path:
    """The directory that holds the package ``trainchaos``."""
    return Path(trainchaos.__path__[0]).parent


def import_path(path: Sequence[str]) -> list[str]:
    """Directories of ``path``, and that of our own packages, that the interpreter does not find by
    itself. Nodes start elsewhere, so they need the list.
    """
    own = str(_where_we_are())
    places = [os.path.abspath(place) for place in [*path, own] if place]
    known = [os.path.abspath(prefix) for prefix in (sys.prefix, sys.base_prefix)]
    return [
        place
        for place in dict.fromkeys(places)
        if os.path.isdir(place) and not any(Path(place).is_relative_to(prefix) for prefix in known)
    ]


def _accounts() -> dict[str, bytes]:
    """root, and the user that the containers run as: torch looks up its name."""
    uid, gid = os.getuid(), os.getgid()
    users, groups = ["root:x:0:0:root:/root:/bin/sh"], ["root:x:0:"]
    if uid:
        try:
            name = pwd.getpwuid(uid).pw_name
        except KeyError:
            name = "user"
        users.append(f"{name}:x:{uid}:{gid}::/tmp:/bin/sh")
        groups.append(f"{name}:x:{gid}:")
    return {
        "etc/passwd": ("\n".join(users) + "\n").encode(),
        "etc/group": ("\n".join(groups) + "\n").encode(),
        "etc/nsswitch.conf": b"passwd: files\ngroup: files\nhosts: files dns\n",
    }


def _versions(
    client: Any,
    image: Any,
    name: str,
    python: str,
    mounts: Sequence[str],
    labels: Mapping[str, str],
) -> dict[str, str]:
    """Versions of the image's software, as printed by a container of it."""
    hint = (
        "build an image with Python and this package, or name its Python with the parameter python"
    )
    with asking(f"run {python} of the image {name}", hint=hint):
        container = client.containers.create(
            image.id,
            entrypoint=[python],
            command=["-c", _PROBE],
            labels=dict(labels),
            network_mode="none",
            volumes=bound(mounts),
        )
        container.start()
        code = container.wait(timeout=PROBE_LIMIT_S)["StatusCode"]
        said = (
            container.logs(stdout=True, stderr=code != 0)
            .decode(errors="replace")
            .strip()
            .splitlines()
        )
        container.remove(force=True)
    try:
        found = json.loads(said[-1]) if code == 0 and said else None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        last = said[-1] if said else f"exit code {code}"
        raise InfrastructureError(f"{python} of the image {name} does not work: {last}", hint=hint)
    return {str(key): str(value) for key, value in found.items()}


def _public(version: str) -> str:
    """The version without its build tag, such as ``+cpu``."""
    return version.partition("+")[0]

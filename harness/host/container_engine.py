"""Access to this machine's container engine through its socket; refusals become readable errors.

The engine is the one in ``DOCKER_HOST``, or else at the usual socket. Every call to it is bounded.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainchaos.chaos.errors import InfrastructureError

CONNECT_LIMIT_S = 5.0
CALL_LIMIT_S = 60.0
USUAL = "unix:///var/run/docker.sock"

RUN_LABEL = "org.trainchaos.run"
"""Label of every container and network of a run: the run's marker, which is unique to the run."""
NODE_LABEL = "org.trainchaos.node"
DIRECTORY_LABEL = "org.trainchaos.directory"
HOLDER_LABEL = "org.trainchaos.holder"
"""``harness.undo.live.HarnessProcess`` of the run, as JSON."""
IMAGE_LABEL = "org.trainchaos.image"

_HINTS = (
    (
        "could not select device driver",
        "GPUs in containers need the NVIDIA container toolkit on this machine",
    ),
    (
        "is already in use by container",
        "it is not of this run and is left alone: rename or remove it",
    ),
    (
        "no space left on device",
        "free disk space where the engine keeps its data (docker info: Docker Root Dir)",
    ),
    ("operation not permitted", "the engine itself lacks a privilege for it: see its log"),
)


def engine_url() -> str:
    """URL of the engine to use."""
    return os.environ.get("DOCKER_HOST") or USUAL


def lacks_engine() -> str | None:
    """Why no engine of this machine can be used now, with a hint; None if one can."""
    try:
        connect().close()
    except InfrastructureError as error:
        return f"{error.message}: {error.hint}" if error.hint else error.message
    return None


def connect(url: str = "") -> Any:
    """A ``docker.DockerClient``; the caller closes it. ``url``: instead of the usual one.

    Raises InfrastructureError, with a hint: no engine, one of another machine, no permission.
    """
    where = url or engine_url()
    if not where.startswith("unix://"):
        raise InfrastructureError(
            f"the Docker engine at {where} may be on another machine; nodes share files and"
            " addresses with this one",
            hint="use an engine of this machine: DOCKER_HOST=unix:///..., or unset it",
        )
    _try_socket(Path(where.removeprefix("unix://")))
    import docker
    from docker.errors import DockerException

    try:
        client = docker.DockerClient(base_url=where, version="auto", timeout=CONNECT_LIMIT_S)
    except (DockerException, OSError) as error:
        raise InfrastructureError(
            f"what listens at {where} does not answer as a Docker engine does:"
            f" {_first_line(error)}",
            hint="see its log; restart it",
        ) from error
    client.api.timeout = CALL_LIMIT_S
    return client


@contextmanager
def asking(what: str, *, hint: str = "") -> Iterator[None]:
    """Turn the engine's errors inside the block into an InfrastructureError. ``what``: the request,
    starting with a verb; ``hint``: what to do if the error itself does not suggest it.
    """
    from docker.errors import APIError, DockerException
    from requests.exceptions import RequestException

    try:
        yield
    except APIError as error:
        why = str(error.explanation or error)
        remedy = next((advice for sign, advice in _HINTS if sign in why.lower()), hint)
        raise InfrastructureError(
            f"the Docker engine could not {what}: {why.strip()}", hint=remedy
        ) from error
    except RequestException as error:
        raise InfrastructureError(
            f"the Docker engine did not {what}: it is gone, or took longer than"
            f" {CALL_LIMIT_S:.0f} s",
            hint=(
                "see its log; when it runs again, chaos heal removes what is left"
                f" ({_first_line(error)})"
            ),
        ) from error
    except DockerException as error:
        raise InfrastructureError(f"could not {what}: {_first_line(error)}", hint=hint) from error


def _try_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as trial:
        trial.settimeout(CONNECT_LIMIT_S)
        try:
            trial.connect(str(path))
        except FileNotFoundError as error:
            raise InfrastructureError(
                f"no Docker engine runs here ({path} is not there)",
                hint="install and start one, or name its socket with DOCKER_HOST",
            ) from error
        except PermissionError as error:
            raise InfrastructureError(
                f"this user may not use the Docker engine's socket {path}",
                hint=f"run as root, or as a member of the group that owns it (ls -l {path})",
            ) from error
        except OSError as error:
            raise InfrastructureError(
                f"no Docker engine answers at {path}: {error.strerror or error}",
                hint="start it: systemctl start docker",
            ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

"""``python -m trainchaos``: the command ``chaos``."""

import sys


def main() -> None:
    """Entry point of ``chaos`` and ``trainchaos``; exits with the codes of ``chaos --help``.

    An environment may have this package without what it needs, for the beacon in its scripts.
    """
    try:
        from trainchaos.chaos import cli
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("trainchaos"):
            raise
        sys.exit(
            f"chaos needs {error.name}, which is not installed in {sys.prefix}: this environment"
            " has trainchaos without its dependencies; call the chaos of another one by its path"
        )
    cli.main()


if __name__ == "__main__":
    main()

"""``python -m trainchaos``: the command ``chaos``."""

from trainchaos.chaos.cli import main

if __name__ == "__main__":
    main()

"""``python -m benchmarks.control_plane``: the decisions alone, without a network."""

from benchmarks.control_plane.controller import main

if __name__ == "__main__":
    main()

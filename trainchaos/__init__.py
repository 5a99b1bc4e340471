"""The four packages of this project under one name, so that no other package named ``recovery`` or
``reports`` can be taken for ours.

In a checkout the packages are symbolic links to the folders at its top; an installation holds the
folders themselves.

For a training script: ``from trainchaos import beacon, recovery``.
"""

from trainchaos.chaos import beacon

__all__ = ["beacon"]

"""What the tests of checkpoints share: file systems of their own."""

from __future__ import annotations

from mounts import mount as mount

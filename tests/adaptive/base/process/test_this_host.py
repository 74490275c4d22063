"""The identifier of a host."""

from __future__ import annotations

import subprocess
import sys

from adaptive.base.process.this_host import this_host


def test_processes_of_one_host_have_one_identifier():
    program = "from adaptive.base.process.this_host import this_host; print(this_host())"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).rstrip("\n") == this_host()

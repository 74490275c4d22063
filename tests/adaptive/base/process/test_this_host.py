"""The identifier of a host."""

from __future__ import annotations

import platform
import subprocess
import sys

from adaptive.base.process.this_host import this_host


def test_processes_of_one_host_have_one_identifier():
    program = "from adaptive.base.process.this_host import this_host; print(this_host())"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).rstrip("\n") == this_host()


def test_hosts_of_other_names_have_other_identifiers(monkeypatch):
    here = this_host()
    monkeypatch.setattr(platform, "node", lambda: "elsewhere")
    assert this_host() != here

"""The installed SGLang, whole: a target that moved, who else hooks it, and a patched copy of it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from conftest import PATCHED_ENVIRONMENT, ask_all, prompts
from test_start import FEATHER, fake_plugin, launch

from feather_sglang import patching

pytestmark = pytest.mark.server


def on_path(folder):
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}


TARGET = "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req"


def test_a_layout_that_moved_a_target_is_refused_with_its_name(tmp_path):
    fake_plugin(
        tmp_path,
        "def register():\n"
        "    from sglang.srt.managers.schedule_policy import PrefillAdder\n"
        "    PrefillAdder.add_request = PrefillAdder.add_one_req\n"
        "    del PrefillAdder.add_one_req\n",
    )
    done = launch("--model-path=nowhere", *FEATHER, environment=on_path(tmp_path))
    assert done.returncode == 2, done.stderr[-2000:]
    line = done.stderr.splitlines()[-1]  # before it SGLang logs why it could not apply the hook
    assert line.startswith(f"feather-sglang: error: {TARGET}: not found in the installed SGLang")


@pytest.mark.parametrize("kind", ["AFTER", "REPLACE"])
def test_doctor_names_another_plugin(tmp_path, kind):
    fake_plugin(
        tmp_path,
        "def register():\n"
        "    from sglang.srt.plugins.hook_registry import HookRegistry, HookType\n"
        f"    HookRegistry.register('{TARGET}', lambda *given: None, HookType.{kind})\n",
    )
    command = [sys.executable, "-m", "feather_sglang.cli", "doctor"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd="/", env={**os.environ, **on_path(tmp_path)}
    )
    assert f"also hooked by plugin 'other' ({kind.lower()})" in done.stdout, done.stderr[-2000:]
    assert done.returncode == (kind == "REPLACE")
    assert ("Feather can run." in done.stdout) == (kind == "AFTER")


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    """A folder with a patched copy of the installed SGLang: links, but for the files that the patch replaces."""
    folder = tmp_path_factory.mktemp("patched")
    (package,) = importlib.util.find_spec("sglang").submodule_search_locations
    subprocess.run(["cp", "--recursive", "--symbolic-link", package, folder / "sglang"], check=True)
    release = importlib.metadata.version("sglang")
    metadata = folder / f"sglang-{release}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {release}\n")
    before = {path: (Path(package) / path).read_bytes() for path in patching.status(folder).patch.files}
    patching.apply(folder)
    assert {path: (Path(package) / path).read_bytes() for path in before} == before, "the installed SGLang is untouched"
    return folder


def test_a_patched_sglang_serves_without_the_plugin_system(serve, patched):
    environment = {**PATCHED_ENVIRONMENT, **on_path(patched)}
    server = serve(environment=environment, launcher=(sys.executable, "-m", "sglang.launch_server"))
    assert len(ask_all(server, prompts(2, 3, 80, 8), tokens=4)) == 6
    assert server.log.read_text().count("Feather is scheduling") == 1
    with urllib.request.urlopen(server.url + "/feather/state") as response:
        assert json.load(response)["schedulers"][0]["scheduling"] == "feather"


def test_a_patched_sglang_without_feather_says_what_to_install(patched):
    code = (
        "import sys, types\n"
        "from sglang.srt.managers.scheduler import Scheduler\n"
        "import sglang.srt.managers.scheduler as module\n"
        f"assert module.__file__.startswith({str(patched)!r}), module.__file__\n"
        "for name in [name for name in sys.modules if name.startswith('feather_sglang')]:\n"
        "    sys.modules[name] = None\n"
        "Scheduler.init_schedule_policy(types.SimpleNamespace(schedule_policy='feather'))\n"
    )
    environment = {"SGLANG_PLATFORM": "feather_cpu", **on_path(patched)}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd="/", env={**os.environ, **environment}
    )
    assert done.returncode == 1, done.stdout
    assert "--schedule-policy feather needs the package feather-sglang; install it" in done.stderr.splitlines()[-1]

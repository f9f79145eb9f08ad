"""What is installed, and what the folder `kernels/` must not hide.

`kernels` is also the name of a Hugging Face library that transformers imports. Ours is therefore linked into the
package (`hf_paged/kernels -> ../kernels`), has no `__init__.py`, and is never installed at top level.
"""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import pytest

from hf_paged._layout import check_layout

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("kernels", "patches")


def run(*args, cwd, **env):
    """Run a Python subprocess that sees nothing of the repository but what `args`, `cwd` and `env` give it."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *map(str, args)],
        cwd=cwd,
        env=inherited | {"HF_HUB_OFFLINE": "1"} | env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
    )


def run_ok(*args, cwd, **env):
    done = run(*args, cwd=cwd, **env)
    assert done.returncode == 0, f"{done.args} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


class Dist(NamedTuple):
    wheel: Path
    sdist: Path
    wheel_from_sdist: Path


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("dist")
    build = ("-m", "build", "--no-isolation", ROOT, "--outdir")
    run_ok(*build, tmp / "direct", "--wheel", cwd=tmp)
    run_ok(*build, tmp / "release", cwd=tmp)  # without --wheel, the wheel is built from the sdist
    only = [list(tmp.glob(pattern)) for pattern in ("direct/*.whl", "release/*.tar.gz", "release/*.whl")]
    assert [len(found) for found in only] == [1, 1, 1]
    return Dist(*(found[0] for found in only))


def contents(wheel):
    """Bytes of each file in a wheel, less RECORD, which only repeats their hashes."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


def source_files():
    """Every Python file of the package, by its path inside it, links followed."""
    folders = [ROOT / "hf_paged", *(ROOT / "hf_paged" / name for name in LINKED)]
    return {path.relative_to(ROOT).as_posix() for folder in folders for path in folder.rglob("*.py") if path.is_file()}


# Prints where each module comes from; the first argument's folder is added as a site directory and searched first.
IMPORT_FROM_SITE = """
import os, site, sys
target, repo = sys.argv[1:]
sys.path[:] = [p for p in sys.path if os.path.realpath(p or ".") != repo]  # not from an editable install
before = set(sys.path)
site.addsitedir(target)
sys.path.sort(key=lambda p: p in before)
import hf_paged, hf_paged.kernels.reference, hf_paged.patches.enable
for module in (hf_paged, hf_paged.kernels.reference, hf_paged.patches.enable):
    print(os.path.abspath(module.__file__))
"""


def test_editable_install_imports_from_the_repository(tmp_path):
    # The build backend's own hook: what `pip install -e .` unpacks into site-packages, without touching ours.
    hook = "import sys; from hatchling.build import build_editable; print(build_editable(sys.argv[1]))"
    wheel = run_ok("-c", hook, tmp_path, cwd=ROOT).splitlines()[-1]
    with zipfile.ZipFile(tmp_path / wheel) as archive:
        archive.extractall(tmp_path / "site")
    files = run_ok("-c", IMPORT_FROM_SITE, tmp_path / "site", ROOT, cwd=tmp_path).splitlines()[-3:]
    expected = ("__init__.py", "kernels/reference.py", "patches/enable.py")
    assert files == [str(ROOT / "hf_paged" / name) for name in expected]


def test_wheel_installs_and_imports(dist, tmp_path):
    site = tmp_path / "site"
    run_ok("-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", site, dist.wheel, cwd=tmp_path)
    files = run_ok("-c", IMPORT_FROM_SITE, site, ROOT, cwd=tmp_path).splitlines()[-3:]
    expected = ("__init__.py", "kernels/reference.py", "patches/enable.py")
    assert files == [str(site / "hf_paged" / name) for name in expected]


def test_wheel_holds_the_whole_package_and_nothing_else(dist):
    names = contents(dist.wheel).keys()
    tops = {PurePosixPath(name).parts[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"hf_paged"}
    assert len(tops) == 2
    assert {name for name in names if name.endswith(".py")} == source_files()
    assert "hf_paged/py.typed" in names


def requirement_names(requirements):
    """Names of the distributions that `requirements` ask for without an extra, normalized."""
    plain = [requirement for requirement in requirements if "extra ==" not in requirement]
    return {re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-") for requirement in plain}


def test_wheel_says_what_it_is(dist):
    files = contents(dist.wheel)
    info = next(name for name in files if name.endswith(".dist-info/METADATA")).removesuffix("METADATA")
    metadata = Parser().parsestr(files[f"{info}METADATA"].decode())
    version = re.search(r'^__version__ = "(.+)"$', (ROOT / "hf_paged" / "__init__.py").read_text(), re.MULTILINE)[1]
    assert (metadata["Name"], metadata["Version"]) == ("hf-paged", version)
    assert (metadata["License-Expression"], metadata["License-File"]) == ("Apache-2.0", "LICENSE")
    assert files[f"{info}licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    assert "hf-paged = hf_paged.cli:app" in files[f"{info}entry_points.txt"].decode()
    assert metadata.get_payload().startswith("# hf-paged")
    newest = re.search(r"^## \[(.+?)\] - ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest[1] == version


def test_what_modules_import_at_once_is_a_dependency(dist):
    # What is optional is imported where it is used.
    files = contents(dist.wheel)
    imported = set()
    for name in source_files():
        for node in ast.parse(files[name]).body:
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(node.module.split(".")[0])
    imported -= {*sys.stdlib_module_names, "hf_paged"}
    assert {"torch", "numba"} <= imported
    metadata = Parser().parsestr(next(text for name, text in files.items() if name.endswith("/METADATA")).decode())
    of_module = importlib.metadata.packages_distributions()
    found = {of_module[module][0].lower().replace("_", "-") for module in imported}
    declared = requirement_names(metadata.get_all("Requires-Dist"))
    # numba brings llvmlite, transformers packaging and tqdm: they would not be without.
    brought = [requirement_names(importlib.metadata.requires(name) or ()) for name in ("numba", "transformers")]
    assert found <= declared.union(*brought)


def test_sdist_builds_the_same_wheel(dist):
    assert contents(dist.wheel_from_sdist) == contents(dist.wheel)


def test_sdist_needs_no_links(dist):
    with tarfile.open(dist.sdist) as archive:
        assert not [member.name for member in archive if member.issym() or member.islnk()]


def test_folder_kernels_does_not_hide_the_library_of_that_name():
    code = "import kernels; kernels.get_kernel; print(kernels.__file__)"
    library = Path(run_ok("-c", code, cwd=ROOT).splitlines()[-1]).resolve()
    # A virtual environment may lie in the repository; our folder is what must not be found.
    assert not library.is_relative_to(ROOT / "kernels")
    assert not library.is_relative_to(ROOT / "hf_paged")


def test_transformers_imports_in_the_repository_root():
    run_ok("-c", "import transformers; transformers.LlamaForCausalLM", cwd=ROOT)


@pytest.mark.parametrize("name", LINKED)
def test_linked_folders_have_no_init_file(name):
    folder = ROOT / "hf_paged" / name
    assert folder.is_dir()
    assert not (folder / "__init__.py").exists()


@pytest.mark.parametrize("name", LINKED)
def test_a_clone_without_links_says_how_to_mend_it(name, tmp_path):
    ignore = shutil.ignore_patterns("__pycache__", name)
    shutil.copytree(ROOT / "hf_paged", tmp_path / "hf_paged", ignore=ignore)
    (tmp_path / "hf_paged" / name).write_text(f"../{name}")  # what git writes with core.symlinks=false
    done = run("-c", "import hf_paged", cwd=tmp_path)
    assert done.returncode != 0
    assert "ImportError" in done.stderr
    assert str(tmp_path / "hf_paged" / name) in done.stderr
    assert "git config core.symlinks true" in done.stderr
    assert "git checkout -- hf_paged/kernels hf_paged/patches" in done.stderr


def test_layout_check_passes_links_and_folders(tmp_path):
    check_layout()
    (tmp_path / "kernels").mkdir()
    (tmp_path / "patches").mkdir()
    check_layout(tmp_path)


def test_layout_check_names_the_file(tmp_path):
    (tmp_path / "patches").write_text("../patches")
    with pytest.raises(ImportError, match="patches is a regular file"):
        check_layout(tmp_path)


# A stand-in for the package, so that hf_paged/__init__.py (which imports torch) is not run.
IMPORT_ALLOCATOR = """
import importlib, sys, types
package = types.ModuleType("hf_paged")
package.__path__ = [sys.argv[1]]
sys.modules["hf_paged"] = package
for name in ("torch", "transformers", "numpy", "numba", "triton"):
    sys.modules[name] = None  # importing it raises ImportError
before = set(sys.modules)
importlib.import_module("hf_paged.allocator")
new = set(sys.modules) - before
print(*sorted(name for name in new if name.split(".")[0] not in sys.stdlib_module_names))
"""


def test_allocator_needs_the_standard_library_alone(tmp_path):
    imported = run_ok("-c", IMPORT_ALLOCATOR, ROOT / "hf_paged", cwd=tmp_path).split()
    assert "hf_paged.allocator" in imported
    assert set(imported) <= {"hf_paged.allocator", "hf_paged.errors"}

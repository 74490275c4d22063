"""Rules of the source text: imports between packages, names that are imported on use, documented public names.

The directions are those of the design: driver -> controllers, monitors -> collectives -> adaptive -> launchers.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.language import nodes_of, parsed
from tests.speed import limit

pytestmark = pytest.mark.seconds(10)

ROOT = Path(__file__).resolve().parents[1]

# What other packages come in by.
DOORS = {"adaptive", "adaptive.data", "adaptive.extend", "adaptive.log"}
# Layers of adaptive that its siblings are built from.
OPEN_LAYERS = ("adaptive.base.", "adaptive.operators.")
# The simulator runs the program's own hooks, batch sizes and members.
OPEN_TO_THE_SIMULATOR = (*OPEN_LAYERS, "adaptive.control.", "adaptive.graph.plan.")
DOORS |= {"collectives", "collectives.strategies", "monitors"}
DOORS |= {"controllers", "controllers.published", "controllers.timing"}
# `launchers` has no door, which would import all of it, and is for nobody else: others of ours come in by these.
BY_MODULE = {
    f"launchers.{module}"
    for module in ("activity", "command", "ending", "hangs", "inspection", "mpirun", "resources", "run")
}
FLOORS = (
    "base",
    "disk",
    "operators",
    "graph",
    "data",
    "runtime",
    "control",
    "check",
    "observe",
    "html_report",
    "program",
)  # of adaptive

MAY_IMPORT = {
    "launchers": set(),
    "adaptive": set(),
    "collectives": {"adaptive", "launchers"},
    "monitors": {"adaptive", "collectives"},
    "controllers": {"adaptive", "collectives"},
}
DECLARED = {"jax", "optax", "numpy", "psutil", "click", "rich", "loky", "cloudpickle"}
THE_JAX_FILE = "adaptive/base/values/jaxprs.py"
IN_ONE_FILE = {  # libraries that one file imports
    "mpi4py": "collectives/worlds/mpi.py",
    "orbax": "adaptive/disk/writing.py",
    "matplotlib": "controllers/simulate/_tables.py",
    "tensorboardX": "adaptive/observe/tensorboard.py",
    "wandb": "adaptive/observe/wandb.py",
    "bokeh": "adaptive/html_report/charts.py",
    "jinja2": "adaptive/html_report/render.py",
}
FILES = [path.relative_to(ROOT).as_posix() for package in MAY_IMPORT for path in sorted((ROOT / package).rglob("*.py"))]


# --- the checkers: source text in, complaints out ---------------------------------------------------------------------


def imports(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Line and absolute name of every module that the source imports, at its top, in functions, or by name."""
    for node in nodes_of(parsed(source)):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                origin = ".".join(filter(None, [package if level else "", module]))
                yield from ((node.lineno, f"{origin}.{alias.name}") for alias in names)
            case ast.Call(func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__")):
                if node.args and isinstance(node.args[0], ast.Constant):
                    yield node.lineno, str(node.args[0].value)


def wrong_imports(source: str, file: str) -> list[str]:
    """What a file of a package imports against the rules, and private JAX reached by attribute."""
    package = file.split("/", maxsplit=1)[0]
    may = {"launchers"} if file == "adaptive/__main__.py" else MAY_IMPORT[package]
    attributes = (n for n in nodes_of(parsed(source)) if isinstance(n, ast.Attribute) and n.attr == "_src")
    wrong = [f"{file}:{n.lineno}: {ast.unparse(n)} is private to JAX" for n in attributes]
    for line, name in imports(source, package):
        room = name.split(".", maxsplit=1)[0]
        if room in MAY_IMPORT and room != package and room not in may:
            wrong.append(f"{file}:{line}: {package} must not know {room} ({name})")
        elif IN_ONE_FILE.get(room, file) != file:
            wrong.append(f"{file}:{line}: {room} is imported in {IN_ONE_FILE[room]} alone")
        elif room not in sys.stdlib_module_names | DECLARED | {*MAY_IMPORT, *IN_ONE_FILE}:
            wrong.append(f"{file}:{line}: {room} is no dependency of the library ({name})")
        layers = OPEN_TO_THE_SIMULATOR if file.startswith("controllers/simulate/") else OPEN_LAYERS
        is_open = name.startswith(layers) or {name.rsplit(".", maxsplit=1)[0], name} & (DOORS | BY_MODULE)
        if room in MAY_IMPORT and room != package and not is_open:
            wrong.append(f"{file}:{line}: {name} is {room}'s own; other packages come in by {' or '.join(DOORS)}")
        if name.startswith("jax._src") or room == "jaxlib":
            wrong.append(f"{file}:{line}: {name} is private to JAX")
    return wrong


def from_above(source: str, file: str) -> list[str]:
    """What a file of a room of adaptive imports from a room above it."""
    _, room, *rest = file.split("/")
    if not rest:
        return []  # the doors stand beside the house
    wrong = []
    for line, name in imports(source, f"adaptive.{room}"):
        top, other, *_ = [*name.split("."), ""]
        if top != "adaptive":
            continue
        if other not in FLOORS:
            wrong.append(f"{file}:{line}: {name} is a door of the house, and no room")
        elif FLOORS.index(other) > FLOORS.index(room):
            wrong.append(f"{file}:{line}: {room} must not know {other}, which is above it ({name})")
    return wrong


def jax_corners(source: str, file: str) -> list[str]:
    """What of JAX is not promised to stay, outside the one file that holds all of it."""
    names = ("source_info_util", "get_bind_params", "make_user_context", "inner_aval", "effects", "compiler_ir")
    names += ("runtime_executable", "jaxprs_in_params", "ctx")
    found = {n.attr: n.lineno for n in nodes_of(parsed(source)) if isinstance(n, ast.Attribute)}
    found |= {name.rpartition(".")[2]: line for line, name in imports(source, "")}
    return [f"{file}:{found[name]}: {name} belongs in {THE_JAX_FILE}" for name in names if name in found]


def _typed_on_use(tree: ast.Module) -> tuple[dict[str, str], dict[str, str]]:
    """The names that a door imports on use, with their modules: as type checkers read them, and as it imports them."""
    imports_ = [s for node in tree.body if isinstance(node, ast.If) for s in node.body if isinstance(s, ast.ImportFrom)]
    typed = {alias.name: f"{'.' * s.level}{s.module or ''}" for s in imports_ for alias in s.names}
    calls = [n.value for n in tree.body if isinstance(n, ast.Assign) and isinstance(n.value, ast.Call)]
    return typed, {name: module for call in calls for name, module in ast.literal_eval(call.args[1]).items()}


def undocumented(name: str, thing: object) -> list[str]:
    """Which of a public function, or of a public class and its own methods, lack a docstring or annotations."""
    if inspect.isclass(thing):
        own = {k: v for k, v in vars(thing).items() if not k.startswith("_")}
        members = [(k, v.fget if isinstance(v, property) else getattr(v, "__func__", v)) for k, v in own.items()]
        methods = [(f"{name}.{k}", v) for k, v in members if inspect.isfunction(v)]
        generated = (thing.__doc__ or "").startswith(f"{thing.__name__}(")  # by @dataclass and NamedTuple
        return ([f"{name} has no docstring"] if generated or not thing.__doc__ else []) + [
            complaint for method in methods for complaint in undocumented(*method)
        ]
    if not inspect.isfunction(thing):
        return []  # a constant, or an alias of a type
    signature = inspect.signature(thing)
    parameters = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    bare = [p.name for p in parameters if p.annotation is p.empty]
    bare += ["return"] if signature.return_annotation is signature.empty else []
    return ([] if inspect.getdoc(thing) else [f"{name} has no docstring"]) + [f"{name}: {b} has no type" for b in bare]


def public(door: ModuleType) -> dict[str, object]:
    """What a door re-exports."""
    statements = ast.parse(Path(str(door.__file__)).read_text()).body
    names = [alias.asname for s in statements if isinstance(s, ast.ImportFrom) for alias in s.names if alias.asname]
    names += _typed_on_use(ast.parse(Path(str(door.__file__)).read_text()))[1]
    return {name: getattr(door, name) for name in names}


# --- the house --------------------------------------------------------------------------------------------------------


# One test for all files: as tests of their own they took seconds of every run to collect.


def complaints(check: Callable[[str, str], list[str]], files: Iterable[str] = FILES) -> list[str]:
    """Return what a checker has against any of the files."""
    assert len(list(files)) > 5
    return [complaint for file in files for complaint in check((ROOT / file).read_text(), file)]


def test_imports_keep_their_direction():
    assert complaints(wrong_imports) == []


def test_one_file_knows_the_corners_of_jax():
    assert complaints(jax_corners, [f for f in FILES if f != THE_JAX_FILE]) == []


def test_every_layer_imports_only_lower_ones():
    assert {file.split("/")[1] for file in FILES if file.startswith("adaptive/") and file.count("/") > 1} == set(FLOORS)
    assert complaints(from_above, [f for f in FILES if f.startswith("adaptive/")]) == []


def test_the_launcher_imports_quickly():
    """JAX takes most of a second to import, for a process that only starts others."""
    program = "import sys, launchers.command, launchers.run; sys.exit('jax' in sys.modules or 'mpi4py' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=limit(100)).returncode == 0


def test_packages_import_optional_and_heavy_modules_on_use():
    """A start is mostly imports, where everything is in the compilation cache."""
    heavy = {"psutil", "click", "rich", "loky", *IN_ONE_FILE, "torch", "datasets", "pandas", "optax"}
    heavy |= {"controllers.policies.balance", "collectives.worlds.mpi", "collectives.worlds.jax_world"}
    heavy |= {"adaptive.check.invariance", "adaptive.program.evaluate", "adaptive.program.checkpoint"}
    program = (
        f"import sys, adaptive, monitors, controllers, collectives; print(*sorted({heavy} & sys.modules.keys()))\n"
    )
    missing = dict.fromkeys(["loky", "cloudpickle", *IN_ONE_FILE])
    program += f"sys.modules.update({missing}); import controllers.simulate, launchers\n"
    program += "[getattr(m, name) for m in (adaptive, collectives, monitors, controllers) for name in dir(m)]"  # on use
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit(100))
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def test_doors_have_the_same_names_for_type_checkers_as_on_use():
    for file in (f for f in FILES if f.endswith("__init__.py")):
        typed, on_use = _typed_on_use(parsed((ROOT / file).read_text()))
        assert typed == on_use, file


@pytest.mark.parametrize(
    "package",
    [
        *(sorted(set(MAY_IMPORT) - {"launchers"})),
        *("adaptive.data", "adaptive.extend", "adaptive.log", "collectives.strategies", "controllers.simulate"),
    ],
)
def test_public_names_are_documented_and_typed(package):
    names = public(importlib.import_module(package))
    assert names
    found = [complaint for name, thing in names.items() for complaint in undocumented(name, thing)]
    assert not found, "\n".join(found)


# --- and would say so if it did not -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("adaptive/graph/plan.py", "def f():\n    from monitors import ema", ":2: adaptive must not know monitors"),
        ("controllers/_hook.py", "import importlib\nimportlib.import_module('monitors')", "must not know monitors"),
        ("collectives/_world.py", "from mpi4py import MPI", "in collectives/worlds/mpi.py alone"),
        ("adaptive/graph/plan.py", "from jax._src import core", "private to JAX"),
        ("adaptive/graph/plan.py", "import torch", "torch is no dependency"),
    ],
)  # fmt: skip
def test_a_wrong_import_is_seen(file, source, complaint):
    assert complaint in "\n".join(wrong_imports(source, file))

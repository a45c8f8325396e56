"""Draw docs/images/architecture.svg and fill the table of rooms in docs/architecture.md, both from the code alone.

Floors come from the import contract in pyproject.toml, arrows from the import statements, words from the docstrings of
the packages. ``--check`` writes nothing and fails when a file is out of date (``make lint`` runs it).
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "fedkin"
PICTURE = ROOT / "docs" / "images" / "architecture.svg"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- rooms: written by scripts/draw_architecture.py -->", "<!-- end of rooms -->"

BOX_WIDTH, BOX_HEIGHT, GAP, FLOOR_HEIGHT, MARGIN = 330, 66, 90, 104, 24
LANE = 16  # between arrows that pass floors on the outside


@dataclass(frozen=True)
class Room:
    """A package (or public module) under ``fedkin``, and what its docstring says it is for."""

    name: str
    summary: str


def read_floors() -> list[list[str]]:
    """The floors of the import contract, from the ground up."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = (one for one in project["tool"]["importlinter"]["contracts"] if one.get("containers") == ["fedkin"])
    return [re.split(r"\s*[:|]\s*", layer) for layer in reversed(contract["layers"])]


def files_of(room: str) -> list[Path]:
    folder = SOURCE / room
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [SOURCE / f"{room}.py"]


def read_room(name: str) -> Room:
    files = files_of(name)
    first = next((path for path in files if path.name == "__init__.py"), files[0])
    docstring = ast.get_docstring(ast.parse(first.read_text(encoding="utf-8"))) or ""
    return Room(name, " ".join(docstring.partition("\n\n")[0].split()))


def sub_rooms(name: str) -> list[str]:
    """Packages in a room."""
    return sorted(path.parent.name for path in (SOURCE / name).glob("*/__init__.py"))


def imported_rooms(path: Path) -> Iterator[str]:
    """Rooms that a file imports anywhere, except for type checkers; also by name, where it uses ``import_module``."""
    text = path.read_text(encoding="utf-8")
    tree, by_name = ast.parse(text), "import_module" in text
    skipped = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in skipped:
            continue
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "fedkin":
                names = [f"fedkin.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif by_name and isinstance(node, ast.Constant) and re.fullmatch(r"fedkin(\.[a-z_]+)+", str(node.value)):
            names = [str(node.value)]
        yield from (name.split(".")[1] for name in names if name.startswith("fedkin."))


def read_imports(rooms: list[str]) -> dict[str, set[str]]:
    """Which rooms each room imports."""
    return {
        room: {other for path in files_of(room) for other in imported_rooms(path)} & set(rooms) - {room}
        for room in rooms
    }


def reduced(imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """The arrows that are not implied by a detour over another room."""

    def reachable(room: str) -> set[str]:
        return imports[room].union(*(reachable(other) for other in imports[room])) if imports[room] else set()

    below = {room: reachable(room) for room in imports}
    return {room: {o for o in others if not any(o in below[via] for via in others)} for room, others in imports.items()}


# --- the picture ------------------------------------------------------------------------------------------------------


def draw(floors: list[list[str]], rooms: dict[str, Room], arrows: dict[str, set[str]]) -> str:
    floor_of = {name: k for k, floor in enumerate(floors) for name in floor}
    middle = {name: (floor.index(name) - (len(floor) - 1) / 2) for floor in floors for name in floor}  # < 0: left
    far = sorted(
        ((room, other) for room, others in arrows.items() for other in others if floor_of[room] - floor_of[other] > 1),
        key=lambda pair: (floor_of[pair[0]] - floor_of[pair[1]], pair),
    )
    lanes: dict[bool, list[tuple[str, str]]] = {True: [], False: []}
    for room, other in far:  # on the side of the room, else of what it imports, else where there is more space
        towards = middle[room] or middle[other]
        lanes[towards < 0 if towards else len(lanes[True]) <= len(lanes[False])].append((room, other))
    side = MARGIN + LANE * max(len(pairs) for pairs in lanes.values()) + 14
    width = 2 * side + 2 * BOX_WIDTH + GAP
    height = 2 * MARGIN + FLOOR_HEIGHT * len(floors) - (FLOOR_HEIGHT - BOX_HEIGHT)

    def corner(name: str) -> tuple[float, float]:
        x = width / 2 + middle[name] * (BOX_WIDTH + GAP) - BOX_WIDTH / 2
        return x, height - MARGIN - BOX_HEIGHT - floor_of[name] * FLOOR_HEIGHT

    lines = []
    for room, others in arrows.items():
        x, y = corner(room)
        for other in sorted(o for o in others if floor_of[room] - floor_of[o] == 1):
            u, v = corner(other)
            shift = (u - x) / 6  # an arrow leaves and arrives a little on the side where the other box is
            start, end, half = x + BOX_WIDTH / 2 + shift, u + BOX_WIDTH / 2 - shift, (y + BOX_HEIGHT + v) / 2
            bend = f"C{start:.0f},{half:.0f} {end:.0f},{half:.0f} {end:.0f},{v:.0f}"
            lines.append(f"M{start:.0f},{y + BOX_HEIGHT:.0f} {bend}")
    for left, pairs in lanes.items():
        for lane, (room, other) in enumerate(pairs):
            (x, y), (u, v) = corner(room), corner(other)
            edge = side - 14 - LANE * lane if left else width - side + 14 + LANE * lane
            out = y + BOX_HEIGHT * (0.35 + 0.15 * sum(room == one for one, _ in pairs[:lane]))
            route = f"M{x if left else x + BOX_WIDTH:.0f},{out:.0f} H{edge:.0f}"
            if middle[other] and (middle[other] < 0) != left:  # behind another box: come from above
                above, down = v - 12, u + BOX_WIDTH * (0.2 if left else 0.8)
                lines.append(f"{route} V{above:.0f} H{down:.0f} V{v:.0f}")
            else:
                into = v + BOX_HEIGHT * (0.25 + 0.15 * sum(other == one for _, one in pairs[:lane]))
                lines.append(f"{route} V{into:.0f} H{u if left else u + BOX_WIDTH:.0f}")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#557"/></marker></defs>',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="white"/>',
        *(
            f'<path d="{line}" fill="none" stroke="#557" stroke-width="1.3" stroke-linejoin="round" '
            'marker-end="url(#tip)"/>'
            for line in lines
        ),
    ]
    for name, room in rooms.items():
        x, y = corner(name)
        parts.append(
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6" fill="#eef2fa" '
            'stroke="#557"/>'
            f'<text x="{x + 12:.0f}" y="{y + 20:.0f}" font-size="15" font-weight="bold" fill="#123">{name}</text>'
        )
        words = textwrap.wrap(plain(room.summary), 50, max_lines=2, placeholder=" …")
        parts += [
            f'<text x="{x + 12:.0f}" y="{y + 38 + 15 * k:.0f}" font-size="11.5" fill="#333">{escape(line)}</text>'
            for k, line in enumerate(words)
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def plain(text: str) -> str:
    return text.replace("`", "")


# --- the table --------------------------------------------------------------------------------------------------------


def table(floors: list[list[str]], rooms: dict[str, Room]) -> str:
    lines = ["| room | what it is for | its sub-rooms |", "|---|---|---|"]
    for floor in reversed(floors):
        for name in floor:
            room = rooms[name]
            where = f"../src/fedkin/{name}" + ("" if (SOURCE / name).is_dir() else ".py")
            words = room.summary.replace("``", "`").replace("|", r"\|")
            inner = ", ".join(f"[`{one}`]({where}/{one})" for one in sub_rooms(name))
            lines.append(f"| [`{name}`]({where}) | {words} | {inner} |")
    return "\n".join([BEGIN, "", *lines, "", END])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail when a file is out of date, and write nothing")
    check = parser.parse_args().check
    floors = read_floors()
    rooms = {name: read_room(name) for floor in floors for name in floor}
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    wanted = {
        PICTURE: draw(floors, rooms, reduced(read_imports(list(rooms)))),
        PAGE: before + table(floors, rooms) + rest.partition(END)[2],
    }
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if check and stale:
        names = " and ".join(str(path.relative_to(ROOT)) for path in stale)
        sys.exit(f"error: {names} no longer shows the code: run scripts/draw_architecture.py")
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

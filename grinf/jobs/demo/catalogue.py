"""The demo's catalogue: the ICD-10-CM tabular list, read at run time from the XML in a package."""

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from grinf.errors import EnvironmentFault

PACKAGE = "simple-icd-10-cm==1.5.0"
REPAIR = f"pip install --force-reinstall '{PACKAGE}'"
ATTRIBUTION = (
    "Data: ICD-10-CM FY2026 (April 2026), CDC/NCHS, read from the package simple-icd-10-cm. "
    "CDC and NCHS do not endorse grinf. Not for clinical use."
)

_SYNONYM_NOTES = ("inclusionTerm", "includes")
_REFERENCE_NOTES = ("excludes1", "excludes2", "useAdditionalCode", "codeFirst", "codeAlso")
_REFERENCE = re.compile(r"(?P<text>.*?)\s*\((?P<codes>[^()]*)\)\s*")
_CODE = re.compile(r"[A-Z][0-9][0-9A-Z](?:\.[0-9A-Z]{1,4})?(?:\.?-)?")


@dataclass(frozen=True, slots=True)
class Item:
    """A code of the catalogue.

    Attributes:
        code: Such as `K81.0`; the item id.
        parent: Index of the code that this one refines; None at the top of a chapter.
    """

    code: str
    title: str
    parent: int | None


@dataclass(frozen=True, slots=True)
class Note:
    """A text that means an item: a synonym in the list, or the words before a code that it points to."""

    text: str
    item: int


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Items in the order of the list, and the notes that name them."""

    items: list[Item]
    notes: list[Note]

    def parent_title(self, item: Item) -> str:
        """Title of the code that `item` refines; empty at the top."""
        return "" if item.parent is None else self.items[item.parent].title


def find_tabular_list() -> Path:
    """Find the XML of the installed package, without importing the package (which parses everything).

    Raises:
        EnvironmentFault: The package is not installed, or holds no tabular list.
    """
    spec = find_spec("simple_icd_10_cm")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = sorted(file for folder in folders for file in Path(folder, "data").glob("icd10c*tabular*.xml"))
    if not found:
        what = f"no tabular list in {', '.join(folders)}" if spec else "the demo's data is not installed"
        raise EnvironmentFault(
            what, "the demo reads the package simple-icd-10-cm", f"pip install '{PACKAGE}'"
        )
    return found[-1]


def read_catalogue(path: Path, chapters: frozenset[int] | None = None) -> Catalogue:
    """Read a tabular list, or some of its chapters.

    A reference outside the chapters that are read is left out.

    Raises:
        EnvironmentFault: The file is no tabular list.
    """
    try:
        root = ET.parse(path).getroot()
    except ET.ParseError as error:
        raise EnvironmentFault(f"{path} is not valid XML", str(error), REPAIR) from error
    items: list[Item] = []
    elements: list[ET.Element] = []
    parents: dict[ET.Element, int] = {}
    for chapter in root.iterfind("chapter"):
        if chapters is None or int(chapter.findtext("name", "0")) in chapters:
            for element in chapter.iter("diag"):  # A code stands before those that refine it.
                parents |= dict.fromkeys(element.iterfind("diag"), len(items))
                code, title = _clean(element.findtext("name")), _clean(element.findtext("desc"))
                items.append(Item(code, title, parents.get(element)))
                elements.append(element)
    if not items:
        raise EnvironmentFault(f"no codes in {path}", "its chapters have no diag elements", REPAIR)
    index = {item.code: position for position, item in enumerate(items)}
    notes = [note for position, element in enumerate(elements) for note in _notes(element, position, index)]
    return Catalogue(items, notes)


def _notes(element: ET.Element, position: int, index: dict[str, int]) -> Iterator[Note]:
    for kind in _SYNONYM_NOTES:
        for note in element.iterfind(f"{kind}/note"):
            yield Note(_clean(note.text), position)
    for kind in _REFERENCE_NOTES:
        for note in element.iterfind(f"{kind}/note"):
            if reference := _REFERENCE.fullmatch(_clean(note.text)):
                for code in _codes(reference["codes"]):
                    if code in index:
                        yield Note(reference["text"], index[code])


def _codes(text: str) -> Iterator[str]:
    """Read `K81.0, K22.1-`; a dash means "all under this code", so the code itself. Ranges name none."""
    for part in re.split(r",\s*", text):
        if _CODE.fullmatch(part):
            yield part.rstrip("-").rstrip(".")


def _clean(text: str | None) -> str:
    return " ".join((text or "").split())

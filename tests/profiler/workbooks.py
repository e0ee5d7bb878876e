"""Reads workbooks back."""

from __future__ import annotations

import zipfile
from pathlib import Path
from xml.etree import ElementTree

SPACE = {"m": "http://schemas.openxmlformats.org/spreadsheetml/2006/main"}


def sheets(path: Path) -> dict[str, list[list[str]]]:
    """What a workbook holds, read as the format says: cells by row, text by number or as it stands."""
    with zipfile.ZipFile(path) as archive:
        shared: list[str] = []
        if "xl/sharedStrings.xml" in archive.namelist():
            items = ElementTree.fromstring(archive.read("xl/sharedStrings.xml")).findall("m:si", SPACE)
            shared = ["".join(item.itertext()) for item in items]
        book = ElementTree.fromstring(archive.read("xl/workbook.xml"))
        found = {}
        for number, sheet in enumerate(book.findall("m:sheets/m:sheet", SPACE), start=1):
            content = ElementTree.fromstring(archive.read(f"xl/worksheets/sheet{number}.xml"))
            rows = content.findall("m:sheetData/m:row", SPACE)
            found[sheet.attrib["name"]] = [
                [_text(cell, shared) for cell in row.findall("m:c", SPACE)] for row in rows
            ]
    return found


def _text(cell: ElementTree.Element, shared: list[str]) -> str:
    kind = cell.attrib.get("t")
    if kind == "inlineStr":
        return "".join(cell.itertext())
    value = cell.findtext("m:v", "", SPACE)
    return shared[int(value)] if kind == "s" else value

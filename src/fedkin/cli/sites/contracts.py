"""What ``fedkin federation draft`` and ``check`` do, and how contracts and findings are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from fedkin._base import count, write_file
from fedkin.cli.shared.console import messages, note, output, print_json
from fedkin.cli.shared.tables import add_row, plain_table, print_facts, schema_table
from fedkin.data import Finding, read_columns, row_places, site_ids
from fedkin.errors import DataError
from fedkin.federate import Contract, draft_contract


@dataclass(frozen=True)
class DraftCommand:
    """What ``fedkin federation draft`` was asked."""

    table: Path
    target: str | None
    site_column: str | None
    name: str | None
    out: Path | None


def draft(command: DraftCommand) -> None:
    """Draft a contract and print it, or write it to a file that is not there yet."""
    out = command.out
    if out is not None and out.exists():
        raise DataError(f"{out} is there already: choose another name, or remove it")
    name = command.name or (command.table if out is None else out).stem
    made = draft_contract(read_columns(command.table), _plain(name), command.target, command.site_column)
    if out is None:
        output().print(Text(made.text), soft_wrap=True, end="")
    else:
        write_file(out, made.text)
    contract = Contract.from_toml(made.text)
    messages().print(
        f"{'drafted' if out is None else out}: {contract.loss['name']} loss for {made.target}, "
        f"{count(len(contract.schema.features), 'feature')}, {count(contract.n_params, 'parameter')}",
        soft_wrap=True,
    )
    for column, reason in made.left_out.items():
        note(f"{column} was left out: {reason}")
    if made.site_column is not None and command.site_column is None:
        note(f"{made.site_column} was taken for the column of the sites")
    note("units are not in the table: fill them in, and check ranges and levels, before you send the contract to sites")


def _plain(name: str) -> str:
    kept = "".join(mark if mark.isascii() and (mark.isalnum() or mark in "_.-") else "-" for mark in name)
    return kept.strip("-_.")[:40] or "federation"


def check(path: Path, data: Path | None, site_column: str | None, as_json: bool) -> bool:
    """Show a contract, and what does not fit of a table; False when rows are refused."""
    contract = Contract.read(path)
    found = {} if data is None else findings_by_site(contract, data, site_column)
    refused = sum(finding.refuses for some in found.values() for finding in some)
    if as_json:
        print_json({"contract": str(path), **contract_document(contract), "findings": _documents(found)})
        return refused == 0
    print_contract(path, contract)
    if data is not None:
        print_findings(data, found)
    return refused == 0


def findings_by_site(contract: Contract, data: Path, site_column: str | None) -> dict[str, list[Finding]]:
    """What does not fit, of the table as a whole ("") or of each site in it."""
    columns = read_columns(data)
    places = row_places(data, columns)
    if site_column is None:
        return {"": contract.check(columns, at=places)}
    if site_column not in columns:
        raise DataError(f"there is no column {site_column!r} for the sites; the table has {', '.join(columns)}")
    ids = [str(one) for one in site_ids(columns[site_column])]
    whole = contract.schema.check(columns, at=places)  # first as a whole, since rows are counted in the whole table
    if any(finding.refuses for finding in whole):
        return {"": whole}
    found = {}
    for site in dict.fromkeys(ids):
        own = [row for row, one in enumerate(ids) if one == site]
        part = {name: column[own] for name, column in columns.items()}
        found[site] = contract.check(part, at=lambda row, own=own: places(own[row]))  # type: ignore[misc]
    return found


def print_contract(path: Path, contract: Contract) -> None:
    """A contract in a few lines and a table of its columns."""
    thresholds, schema = contract.thresholds, contract.schema
    how = "by kin" if contract.method == "kin" else f"fused by the {contract.penalty} penalty"
    target = "no target" if schema.target is None else f"target {schema.target.name}"
    print_facts(
        {
            "contract": f"{path}: {contract.name}, digest {contract.digest[:16]}",
            "model": f"{contract.loss['name']} loss, {how}, {target}, {count(contract.n_params, 'parameter')}",
            "thresholds": f"{thresholds.rows} rows, {thresholds.rows_per_parameter:g} for each parameter, "
            f"{thresholds.cell} with any level that occurs",
        }
    )
    output().print(schema_table(schema))


def print_findings(data: Path, found: Mapping[str, Sequence[Finding]]) -> None:
    """Findings in a table: what must be mended, then remarks."""
    listed = [(site, finding) for site, some in found.items() for finding in some]
    refused = sum(finding.refuses for _, finding in listed)
    console = output()
    if not listed:
        console.print(f"{data}: fits", style="green", soft_wrap=True)
        return
    by_site = any(site for site, _ in listed)
    table = plain_table(*(["site"] if by_site else []), "column", "finding", "", numbers_from=9)
    for site, finding in sorted(listed, key=lambda one: not one[1].refuses):
        weight = "must be mended" if finding.refuses else "remark"
        cells = [finding.column or "(table)", finding.text, weight]
        add_row(table, *([site] if by_site else []), *cells, style="" if finding.refuses else "dim")
    console.print(table)
    verdict = f"{count(refused, 'finding')} to mend before the rows can be used" if refused else "fits, with remarks"
    console.print(f"{data}: {verdict}", style="red" if refused else "green", soft_wrap=True)


def contract_document(contract: Contract) -> dict[str, Any]:
    """A contract for ``--json``."""
    return {
        "name": contract.name,
        "digest": contract.digest,
        "loss": contract.loss,
        "parameters": list(contract.parameter_names),
        "schema": contract.schema.plain(),
    }


def _documents(found: Mapping[str, Sequence[Finding]]) -> list[dict[str, Any]]:
    return [
        {"site": site or None, "column": one.column or None, "words": one.text, "refuses": one.refuses}
        for site, some in found.items()
        for one in some
    ]

"""Table files: what they refuse, and that the bundled ones are whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from sim.quantities import OF_A_MODEL, OF_A_RUN
from testbed.commands.errors import UserError
from testbed.commands.published.tables import FOLDER, Table, cases, load_tables
from testbed.scenario.errors import ScenarioError

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios" / "published"
TABLES = load_tables()

TWO: dict[str, Any] = {
    "table": "two",
    "title": "Two numbers",
    "source": "a test",
    "conditions": "none",
    "scenario": "miles_weight_transfer.yaml",
    "numbers": [
        {
            "name": name,
            "variant": variant,
            "quantity": "p2p_total_s",
            "published": published,
            "unit": "s",
            "role": "predicted",
        }
        for name, variant, published in (
            ("small", "GLM-4.7-9B-Flash, 1 + 1 nodes", 4.0),
            ("large", "Kimi-K2 1T, 32 + 32 nodes", 6.0),
        )
    ],
}


def written(folder: Path, **changes: Any) -> Path:
    (folder / "two.yaml").write_text(yaml.safe_dump({**TWO, **changes}))
    return folder


def said(folder: Path) -> str:
    with pytest.raises(ScenarioError) as error:
        load_tables(folder)
    return str(error.value)


def test_every_bundled_table_names_what_exists() -> None:
    """Scenarios, variants and quantities; `cases` raises for one that is missing."""
    assert len(TABLES) == len(list(FOLDER.glob("*.yaml")))
    for table in TABLES:
        for case in cases(table, SCENARIOS):
            assert set(case.quantities) <= {*OF_A_RUN, *OF_A_MODEL}, table.table


def test_every_published_scenario_belongs_to_a_table() -> None:
    assert {t.scenario for t in TABLES if t.scenario} == {p.name for p in SCENARIOS.glob("*.yaml")}


def test_few_are_fitted_and_many_predicted() -> None:
    roles = [n.role for t in TABLES for n in t.numbers]
    assert roles.count("predicted") > 2 * roles.count("fitted")
    for table in TABLES:
        assert len(table.fit) <= sum(n.role == "fitted" for n in table.numbers)


def test_pending_tables_come_last_and_say_why() -> None:
    pending = [bool(t.pending) for t in TABLES]
    assert pending == sorted(pending)
    assert {t.table for t in TABLES if t.pending} == set()


def test_an_order_that_the_published_values_do_not_have_is_refused(tmp_path: Path) -> None:
    orders = [{"says": "wrong way round", "rising": ["large", "small"]}]
    assert "`wrong way round`: the published values do not rise in this order" in said(written(tmp_path, orders=orders))


def test_an_order_of_an_unknown_number_names_the_nearest(tmp_path: Path) -> None:
    orders = [{"says": "typo", "rising": ["smal", "large"]}]
    assert "`smal`, which is no number of the table (nearest: small)" in said(written(tmp_path, orders=orders))


def test_a_table_without_numbers_says_why(tmp_path: Path) -> None:
    assert "either numbers or a reason why it is `pending`" in said(written(tmp_path, numbers=[]))


def test_a_fitted_number_needs_a_parameter(tmp_path: Path) -> None:
    numbers = [{**TWO["numbers"][0], "role": "fitted"}]
    assert "fitted numbers and `fit` belong together" in said(written(tmp_path, numbers=numbers))


def test_a_wrong_key_is_placed(tmp_path: Path) -> None:
    assert "two.yaml" in said(written(tmp_path, sources="a typo")) and "sources" in said(tmp_path)


def test_names_must_agree_and_exist(tmp_path: Path) -> None:
    (tmp_path / "three.yaml").write_text(yaml.safe_dump(TWO))
    with pytest.raises(UserError, match=r"calls itself `two` \(nearest: table: three\)"):
        load_tables(tmp_path)
    with pytest.raises(UserError, match=r"--only mile: no such table \(nearest: miles_"):
        load_tables(only=["mile"])


def test_a_missing_variant_names_the_nearest() -> None:
    numbers = [{**TWO["numbers"][0], "variant": "Kimi-K2 1T"}]
    table = Table.model_validate({**TWO, "numbers": numbers})
    with pytest.raises(UserError, match=r"no variant `Kimi-K2 1T` \(nearest: Kimi-K2 1T, 32"):
        cases(table, SCENARIOS)


def test_a_variant_is_simulated_once_for_all_its_numbers() -> None:
    doubled = [*TWO["numbers"], {**TWO["numbers"][0], "name": "again", "quantity": "broadcast_total_s"}]
    found = cases(Table.model_validate({**TWO, "numbers": doubled}), SCENARIOS)
    assert [c.quantities for c in found] == [("p2p_total_s", "broadcast_total_s"), ("p2p_total_s",)]

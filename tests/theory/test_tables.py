"""The tables that people read."""

from __future__ import annotations

from mukron.theory import comparison_table, method_table


def rows(table):
    return {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}


def test_one_method():
    table = rows(method_table("shampoo", "mup"))
    assert table["output"]["initial std x"] == "r_in^-1"
    assert table["output"]["learning rate x"] == "r_in^-1/2"
    assert table["output"]["rho_L x"] == "r_in"
    assert table["input"]["learning rate x"] == "r_out^1/2"
    assert table["hidden"]["learning rate x"] == "r_out^1/2 / r_in^1/2"
    assert table["hidden"]["rho_R x"] == "r_in / r_out"
    assert (table["hidden"]["b"], table["hidden"]["c"], table["hidden"]["d_L"]) == ("1/2", "0", "0")
    assert table["scalar"]["learning rate x"] == "1"
    assert (table["vector"]["rho_L x"], table["vector"]["rho_R x"], table["vector"]["d_R"]) == ("r_out^-1", "-", "-")
    assert rows(method_table("shampoo:1/2,input"))["vector"]["rho_R x"] == "r_out^-1"
    assert rows(method_table("kfac"))["vector"]["rho_A x"] == "1"


def test_sp_scales_no_step():
    assert {row["learning rate x"] for row in rows(method_table("sgd", "sp")).values()} == {"1"}


def test_side_by_side():
    table = rows(comparison_table("mup"))
    assert table["K-FAC"]["input and vector"] == "b=0, c=0, d_A=0, d_B=1"
    assert table["K-FAC"]["hidden"] == "b=1/2, c=0, d_A=-1, d_B=1"
    assert table["K-FAC"]["output"] == "b=1, c=0, d_A=-1, d_B=0"
    assert table["SGD"]["output"] == "b=1, c=1"
    assert rows(comparison_table("ntk"))["SGD"]["hidden"] == "b=1/2, c=1"

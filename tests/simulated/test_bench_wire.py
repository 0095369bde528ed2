"""The benchmark of bytes on the wire, tiny: what sends fewer bytes for the same losses."""

from support.benchmarking import program, read


def test_wire(tmp_path, capsys):
    target = tmp_path / "wire.csv"
    program("bench_wire").main(["--smoke", "--csv", str(target)])
    equal, unequal = read(target)[:4], read(target)[4:]
    ways = [(row["placement"], row["wire_dtype"], row["commit_interval"]) for row in equal]
    assert ways == [
        ("rows", "float32", "1"),
        ("tables", "float32", "1"),
        ("tables", "bfloat16", "1"),
        ("tables", "bfloat16", "4"),
    ]
    rows, tables, half, merged = ({k: number(v) for k, v in row.items()} for row in equal)
    assert rows["mb rows"] > 0.03 and tables["mb rows"] == 0
    # 4 whole tables of 64 bags on other ranks, of 64 bytes
    assert tables["mb sums of bags"] == tables["mb gradients of bags"] == 0.016
    assert half["mb sums of bags"] == half["mb gradients of bags"] == 0.008
    assert rows["mb parity deltas"] == tables["mb parity deltas"] > 0.01
    assert tables["mb"] < 0.8 * rows["mb"]
    # nearly every row is updated in each step, and its delta is sent once in four steps
    assert half["mb parity deltas"] == tables["mb parity deltas"]
    assert merged["mb parity deltas"] < 0.3 * half["mb parity deltas"]
    assert merged["mb sums of bags"] == half["mb sums of bags"]
    assert [row["placement"] for row in unequal[1:3]] == ["tables", "tables, with pooling_factors"]
    blind, known = (number(row["lookups_of_fullest"]) for row in unequal[1:3])
    assert known < blind
    assert "parity" in capsys.readouterr().out


def number(text):
    try:
        return float(text)
    except ValueError:
        return text

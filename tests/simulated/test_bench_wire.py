"""The benchmark of bytes on the wire, tiny: whole tables send fewer bytes for the same losses."""

from support.benchmarking import program, read


def test_wire(tmp_path, capsys):
    target = tmp_path / "wire.csv"
    program("bench_wire").main(["--smoke", "--csv", str(target)])
    rows, tables = read(target)
    assert (rows["placement"], tables["placement"]) == ("rows", "tables")
    assert float(rows["mb rows"]) > 0.03 and float(tables["mb rows"]) == 0
    # 4 whole tables of 64 bags on other ranks, of 64 bytes
    assert float(tables["mb sums of bags"]) == float(tables["mb gradients of bags"]) == 0.016
    assert float(rows["mb parity deltas"]) == float(tables["mb parity deltas"]) > 0.01
    assert float(tables["mb"]) < 0.8 * float(rows["mb"])
    assert "parity" in capsys.readouterr().out

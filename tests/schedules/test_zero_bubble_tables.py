"""The simulator gives the bubbles that Zero Bubble printed (Qi et al. 2023, arXiv 2401.10241)."""

from __future__ import annotations

import pytest

from minitrain.schedules import Times
from minitrain.schedules.build import build
from minitrain.schedules.simulate import simulate

# Table 9's p, M and F, B, W, T in ms with Table 5's 1F1B, 1F1B-I, ZB-H1, ZB-H2; by model.
TABLE_5 = {
    "1.5B": """
        8 24 18.522 18.086 9.337 0.601 0.2431 0.1055 0.1585 0.1083
        8 32 18.513 18.086 9.331 0.626 0.1985 0.0818 0.1242 0.0837
        8 64 18.546 18.097 9.321 0.762 0.1240 0.0443 0.0674 0.0444""",
    "6.2B": """
        8 24 29.718 29.444 19.927 0.527 0.2347 0.0808 0.1323 0.0698
        8 32 29.802 29.428 19.530 0.577 0.1898 0.0628 0.1045 0.0559
        8 64 29.935 29.621 19.388 0.535 0.1091 0.0320 0.0554 0.0294""",
    "14.6B": """
        16 48 11.347 11.248 8.132 0.377 0.2552 0.1104 0.1397 0.0672
        16 64 11.307 11.254 8.101 0.379 0.2082 0.0852 0.1088 0.0516
        16 128 11.325 11.308 8.109 0.378 0.1251 0.0445 0.0576 0.0266""",
    "28.3B": """
        32 96 10.419 10.207 7.715 0.408 0.2646 0.1493 0.1421 0.0641
        32 128 10.408 10.204 7.703 0.408 0.2168 0.1164 0.1106 0.0490
        32 256 10.402 10.248 7.698 0.460 0.1352 0.0624 0.0594 0.0257""",
}
# The paper does not say how many chunks; these are the nearest.
CHUNKS = {"1.5B": 3, "6.2B": 4, "14.6B": 3, "28.3B": 2}
ROWS = [(model, *line.split()) for model, rows in TABLE_5.items() for line in rows.split("\n")[1:]]


def simulated(name: str, p: int, m: int, times: list[float], chunks: int | None = None) -> float:
    schedule = build(name, p, m, chunks)
    return simulate(schedule, Times.uniform(schedule.route, *times)).bubble


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row[:3]))
def test_table_5(row: tuple[str, ...]) -> None:
    p, m, times, printed = int(row[1]), int(row[2]), [*map(float, row[3:7])], [*map(float, row[7:])]
    for name, bubble in zip(("1f1b", "zb-h1", "zb-h2"), (printed[0], *printed[2:]), strict=True):
        assert round(simulated(name, p, m, times), 4) == bubble, name
    # The paper's count of transfers is smaller by p.
    interleaved = simulated("interleaved", p, m, times, CHUNKS[row[0]])
    assert abs(interleaved - printed[1]) < 0.004


# Table 8: p, M, then 1F1B, ZB-H1, ZB-H2 and ZB-V. Its times are not printed. These shares of a
# micro-batch's whole time, one set for each model, are those that give its first three columns.
TABLE_8 = {
    (0.3689, 0.3796, 0.2516, 0.0209): """
        16 48 0.2668 0.1536 0.0823 0.0697
        16 64 0.2206 0.1198 0.0630 0.0533
        16 128 0.139 0.0637 0.0325 0.0274""",
    (0.3887, 0.3347, 0.2767, 0.0199): """
        24 72 0.2699 0.1439 0.0628 0.0638
        24 96 0.2229 0.1121 0.0480 0.0483
        24 192 0.1403 0.0595 0.0247 0.0250""",
    (0.3659, 0.3591, 0.2751, 0.0166): """
        32 96 0.2676 0.1429 0.0629 0.0593
        32 128 0.2204 0.1111 0.0478 0.0451
        32 256 0.1362 0.0593 0.0251 0.0236""",
}


@pytest.mark.parametrize(
    ("times", "line"), [(times, line) for times, rows in TABLE_8.items() for line in
                        rows.split("\n")[1:]], ids=lambda value: "-".join(str(value).split()[:2])
)  # fmt: skip
def test_table_8(times: tuple[float, ...], line: str) -> None:
    p, m = map(int, line.split()[:2])
    *three, zb_v = map(float, line.split()[2:])
    for name, printed in zip(("1f1b", "zb-h1", "zb-h2"), three, strict=True):
        assert simulated(name, p, m, [*times]) == pytest.approx(printed, abs=0.001)
    assert abs(simulated("zb-v", p, m, [*times]) - zb_v) < 0.004  # the issue asks for 0.01


def test_zb_v_with_the_times_of_table_9() -> None:
    """The one model that both tables have with the same number of stages."""
    times = [10.419, 10.207, 7.715, 0.408]
    assert abs(simulated("zb-v", 32, 96, times) - 0.0593) < 0.01

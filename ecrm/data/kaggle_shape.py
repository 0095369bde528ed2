"""What is known of the columns of the Criteo Kaggle training set: aggregate numbers only, no rows.

Measured on a uniform sample of `SAMPLE_ROWS` rows, but for the cardinalities, which are the published
ones of the whole sets. Columns are in the order of the files, 13 integers and 26 categories.
"""

SAMPLE_ROWS = 137_139
CLICK_RATE = 0.2568

CARDINALITIES = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
TERABYTE_CARDINALITIES = (
    227605432, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 130229467, 3067956, 405282, 10,
    2209, 11938, 155, 4, 976, 14, 292775614, 40790948, 187188510, 590152, 12973, 108, 36,
)  # fmt: skip

INTEGER_MISSING_PERCENT = (45.1, 0.0, 21.3, 21.4, 2.6, 22.3, 4.3, 0.1, 4.3, 45.1, 4.3, 76.5, 21.4)
INTEGER_MINIMUM = (0, -2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
INTEGER_MAXIMUM = (425, 10255, 65535, 349, 2071071, 111105, 6498, 1689, 9465, 7, 123, 193, 1574)

CATEGORY_MISSING_PERCENT = (
    0.0, 0.0, 3.4, 3.4, 0.0, 12.2, 0.0, 0.0, 0.0, 0.0, 0.0, 3.4, 0.0,
    0.0, 0.0, 3.4, 0.0, 0.0, 44.2, 44.2, 3.4, 76.1, 0.0, 3.4, 44.2, 44.2,
)  # fmt: skip
TOP_VALUE_PERCENT = (
    50.0, 11.3, 3.4, 3.6, 67.4, 39.6, 2.1, 59.5, 90.0, 22.2, 3.2, 3.4, 3.2,
    34.9, 1.6, 3.4, 46.0, 3.2, 44.2, 44.2, 3.4, 76.1, 43.7, 5.3, 44.2, 44.2,
)  # fmt: skip
"""Share of rows that hold the most frequent value, where missing counts as a value."""
DISTINCT_VALUES = (
    616, 528, 61763, 32222, 154, 11, 8634, 292, 3, 13982, 4087, 56396, 2944,
    26, 5897, 46381, 10, 2827, 1341, 3, 52249, 12, 14, 14595, 54, 11138,
)  # fmt: skip
"""Distinct values in the sample, missing not counted."""
VALUES_SEEN_ONCE = (
    289, 24, 54979, 24122, 52, 0, 1787, 114, 0, 6496, 515, 49452, 185,
    0, 1798, 38971, 0, 679, 280, 0, 45129, 3, 0, 8706, 9, 6585,
)  # fmt: skip
LOOKUPS_COVERED_BY_TOP_1_PERCENT = 0.727
LOOKUPS_COVERED_BY_TOP_10_PERCENT = 0.887
"""Share of all lookups of values that are not missing that go to the most frequent 1 % and 10 % of the
distinct values in the sample, those of all columns taken together."""

ZIPF = (
    (0.0000, 1.9336, 0.9087), (0.0736, 3.0471, 46.843), (0.0000, 1.0037, 1.3946), (0.0300, 1.2359, 33.3141),
    (0.0000, 2.5594, 0.9503), (0.0690, 1.0100, 0.1350), (0.0204, 19.0652, 29187.45), (0.0000, 2.2324, 0.9237),
    (0.6906, 1.0100, 0.1350), (0.2212, 2.2481, 1198.403), (0.0303, 12.000, 6310.688), (0.0000, 1.0263, 1.7712),
    (0.0301, 10.500, 4914.769), (0.0289, 1.0100, 0.2870), (0.0140, 3.8772, 1407.589), (0.0000, 1.0733, 2.6673),
    (0.0273, 1.0100, 0.2230), (0.0281, 5.5927, 1139.761), (0.0000, 7.0958, 799.2836), (0.4709, 1.0100, 0.1350),
    (0.0000, 1.0447, 2.1072), (0.0000, 3.1598, 0.1686), (0.0168, 1.0100, 0.1740), (0.0502, 1.6115, 125.0527),
    (0.0000, 7.8630, 17.7926), (0.0000, 1.6045, 142.536),
)  # fmt: skip
"""Per column (atom, exponent, offset) of the law that ids are drawn by: with probability `atom` the id 0,
else `floor(x)` with x of density proportional to (x + offset)^-exponent on [0, cardinality). Fitted by
least squares to the column's distinct values, values seen once and share of the top value."""

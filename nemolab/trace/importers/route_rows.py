"""The rows of a csv of whole numbers and one column of weights, as columns: 4 million rows in seconds, little memory.

A general reader would take `" 1"`, `1.0` or a quoted field for a number, fill a row that was cut off, and not say on
which line it stumbled. This one knows digits, commas and line ends (LF or CRLF), and stops at anything else.
"""

from __future__ import annotations

import numpy as np

from nemolab.jit import jit, jit_inner

SKIP, WEIGHT = -1, -2  # what a column is, where it is not the number of an integer column
DONE, COMMENT, FULL, FAULT = range(4)
MOST_DIGITS = 18  # as many as int64 surely holds
_HASH, _COMMA, _LF, _CR, _MINUS, _PLUS, _DOT, _ZERO, _NINE = (ord(letter) for letter in "#,\n\r-+.09")
_E, _N, _A = (ord(letter) for letter in "ena")
_LOWER = 32  # the bit that makes an ASCII letter a small one


@jit_inner
def _read_digits(text, at, end):
    """(value, number of digits, where they end); digits past MOST_DIGITS are counted but not kept."""
    value = 0
    digits = 0
    while at < end and _ZERO <= text[at] <= _NINE:
        if digits < MOST_DIGITS:
            value = value * 10 + (text[at] - _ZERO)
        digits += 1
        at += 1
    return value, digits, at


@jit_inner
def _read_weight(text, at, end):
    """(value, where it ends); it ends where it began if there is no decimal number and no `nan`.

    18 digits and a power of ten: within two units in the last place of a double, far below that of a float32.
    """
    begin = at
    negative = at < end and text[at] == _MINUS
    if negative:
        at += 1
    if at + 3 <= end and text[at] | _LOWER == _N and text[at + 1] | _LOWER == _A and text[at + 2] | _LOWER == _N:
        return np.nan, at + 3
    value, digits, at = _read_digits(text, at, end)
    exponent = max(0, digits - MOST_DIGITS)
    kept = digits
    if at < end and text[at] == _DOT:
        at += 1
        while at < end and _ZERO <= text[at] <= _NINE:
            if kept < MOST_DIGITS:
                value = value * 10 + (text[at] - _ZERO)
                exponent -= 1
                kept += value > 0  # zeros before the first digit that counts cost nothing
            digits += 1
            at += 1
    if digits == 0:
        return 0.0, begin
    if at < end and text[at] | _LOWER == _E:
        sign = 1
        at += 1
        if at < end and (text[at] == _MINUS or text[at] == _PLUS):
            sign = -1 if text[at] == _MINUS else 1
            at += 1
        power, digits, at = _read_digits(text, at, end)
        if digits == 0 or digits > 4:
            return 0.0, begin
        exponent += sign * power
    result = value / 10.0**-exponent if exponent < 0 else value * 10.0**exponent
    return -result if negative else result, at


@jit
def parse_rows(text, at, end, columns, integers, weights):
    """Read rows from text[at:end] until there is a comment, no more room or something that is no row.

    text      uint8; at is the beginning of a line
    columns   int64 [columns]: where each column goes: a row of `integers`, SKIP or WEIGHT
    integers  int64 [integer columns, room]; weights float64 [room], nan for `nan`
    returns   (rows read, beginning of the line it stopped at, DONE | COMMENT | FULL | FAULT)
    """
    row = 0
    n_columns = len(columns)
    while at < end:
        if text[at] == _HASH:
            return row, at, COMMENT
        if row == len(weights):
            return row, at, FULL
        place = at
        for column in range(n_columns):
            target = columns[column]
            if target >= 0:
                sign = 1
                if place < end and text[place] == _MINUS:
                    sign = -1
                    place += 1
                value, digits, place = _read_digits(text, place, end)
                if digits == 0 or digits > MOST_DIGITS:
                    return row, at, FAULT
                integers[target, row] = sign * value
            elif target == WEIGHT:
                begin = place
                weights[row], place = _read_weight(text, place, end)
                if place == begin:
                    return row, at, FAULT
            else:
                while place < end and text[place] != _COMMA and text[place] != _LF and text[place] != _CR:
                    place += 1
            if column < n_columns - 1:
                if place == end or text[place] != _COMMA:
                    return row, at, FAULT
                place += 1
        if place < end and text[place] == _CR:
            place += 1
        if place < end:
            if text[place] != _LF:
                return row, at, FAULT
            place += 1
        at = place
        row += 1
    return row, at, DONE

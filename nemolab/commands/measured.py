"""How verbs show what was measured, and keep it as rows."""

from nemolab.commands.verb import Answer, settings, table


def answer_with_rows(data: dict, record: bool) -> Answer:
    """Figures as a table, the settings below it.

    record  keep `data["rows"]`, each the arguments of `measure.record`, as those of one run
    """
    if record:
        from nemolab.measure import record_run

        record_run(data["rows"], settings().began)
    facts = [[name, plain(value)] for name, value in data.items() if isinstance(value, int | float | str)]
    said = data["rows"][0]["settings"].items()
    chosen = ", ".join(f"{name} {value}" for name, value in said if not isinstance(value, dict))
    return Answer(data, f"{table(['figure', 'value'], facts)}\n\n{chosen}")


def plain(value: int | float | str) -> str:
    """Short, for a table.

    >>> plain(0.123456)
    '0.1235'
    """
    return f"{value:.4g}" if isinstance(value, float) else str(value)

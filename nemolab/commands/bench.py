"""`nemolab bench`: timings as ratios taken in one run, with their samples, settings and machine."""

import click


@click.group("bench")
def bench():
    """How fast is it, beside a floor or a rival measured in the same run?

    \b
    Examples:
      nemolab bench decode
      nemolab bench expert --record --json
    """

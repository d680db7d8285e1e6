"""`nemolab simulate`: what a cache of any size and policy would have done for a recorded trace."""

import click

from nemolab.commands.verb import Answer, PathName, table, verb


@verb("simulate")
@click.argument("trace", metavar="TRACE", type=PathName())
@click.option("--budget", "budgets", default=None, metavar="LIST", help="Sizes of the cache: 500MiB,2GiB,4854slots.")
@click.option("--policy", "policies", default="lru,belady", show_default=True, metavar="LIST", help="Or: all.")
@click.option("--prefetch", "prefetches", default="0", show_default=True, metavar="LIST", help="Guesses read ahead.")
@click.option("--cold", is_flag=True, help="Empty the cache at each conversation; else it is carried over.")
def simulate(trace, budgets, policies, prefetches, cold):
    """What would a cache have hit, and what would it have read?

    \b
    Examples:
      nemolab simulate trace.safetensors
      nemolab simulate trace.safetensors --budget 500MiB,2GiB,4854slots --policy lru,belady --prefetch 0,4 --json
    """
    from nemolab.simulate import asked, default_budgets, from_trace, sweep
    from nemolab.trace import open_trace

    budgets = None if budgets is None else asked.read_budgets(budgets)
    policies, prefetches = asked.read_policies(policies), asked.read_prefetches(prefetches)
    lookups = from_trace(open_trace(trace))
    rows = sweep(lookups, budgets or default_budgets(lookups), policies, prefetches, cold=cold)
    columns = ["policy", "phase", "budget_bytes", "slots", "prefetch", "hit_rate", "reads_per_token"]
    return Answer({"rows": rows}, table(columns, [[row[name] for name in columns] for row in rows]))

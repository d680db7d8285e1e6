"""Tables of measurements on CUDA cards, each from the newest recorded rows."""

from nemolab.readme.markdown import how_taken, markdown_table, spread


def moe_step_table() -> str:
    """One MoE layer on a card by transfer strategy, beside the time of its bytes, from the newest recorded runs."""
    from nemolab.measure.transfer import read_timed

    rows, taken, rates = [], [], []
    for active in (0.075, 1.0):
        timed = read_timed(active).set_index("strategy")
        whole, pull = timed.loc["whole"], timed.loc["pull"]
        copy_gb_s, read_gb_s = (
            1e-3 * case[moved] / case["floor_us"] for case, moved in ((whole, "bytes_copied"), (pull, "bytes_in_place"))
        )
        rates.append(f"{active:.1%}: {copy_gb_s:.1f} and {read_gb_s:.1f}")
        for strategy, case in timed.iterrows():
            row = case["row"]
            rows.append(
                [
                    "`pull` as a CUDA graph" if strategy == "pull_graph" else f"`{strategy}`",
                    f"{100 * case['active']:.3g}",
                    f"{case['bytes_copied'] / 1e6:.1f}",
                    f"{case['bytes_in_place'] / 1e6:.1f}",
                    f"{case['floor_us']:,.0f}",
                    f"{case['us']:,.0f} ({case['low_us']:,.0f} to {case['high_us']:,.0f})",
                    f"{case['of_floor']:.3f}",
                    len(row["values"]),
                ]
            )
            taken.append(row)
    headers = ["strategy", "active, %:", "MB copied:", "MB read in place:", "floor, us:", "measured, us:"]
    how = (
        f"{how_taken(taken)}. {taken[0]['settings']['experts']} experts of Nemotron-3-Super's shape, all in page-locked"
        " memory. Median (least to most); all in turns in one run. GB/s copied and read in place there, of "
        f"{'; of '.join(rates)}."
    )
    return f"{how}\n\n{markdown_table([*headers, 'measured / floor:', 'samples:'], rows)}"


def linear_table() -> str:
    """Dense products of one token on a card, as a share of the bandwidth of a kernel that only reads."""
    from nemolab.measure import latest

    read = latest("linear.read_bandwidth")
    rows = []
    for kind in ("fp8", "nvfp4", "bf16"):
        time_us, share = latest(f"linear.{kind}"), latest(f"linear.{kind}_of_read")
        settings = share["settings"]
        shape = f"{settings['rows']:,} x {settings['columns']:,}"
        share_cell = f"{100 * share['median']:.1f} ({100 * share['low']:.1f} to {100 * share['high']:.1f})"
        rows.append([kind, shape, f"{settings['bytes'] / 1e6:.1f}", spread(time_us), share_cell])
    headers = ["format", "matrix", "MB:", "us:", "% of the read bandwidth:"]
    bandwidth = f"Read bandwidth: {read['median']:,.0f} GB/s"
    how = f"{how_taken([read])}. {bandwidth}. Median (least to most) of {len(read['values'])}."
    return f"{how}\n\n{markdown_table(headers, rows)}"

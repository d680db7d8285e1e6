"""Routing traces as others write them, one module a form. Its docstring shows the layout that it reads.

route_trace   BigMoeOnEdge's csv: route_header the comments above its rows, route_table all rows, route_rows quickly
token_jsonl   a JSON line for each token, with all its layers
layer_jsonl   a JSON line for each token and layer; json_lines parses the lines of both
routed_npz    `routed_experts` in a NumPy archive
arrange       what all of them end with: arrays and facts made a checked `Trace`

A new form is a module with NAME, LAYOUT and read(path, overrides), and a way to know it in `nemolab.trace.open`.
"""

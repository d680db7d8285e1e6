"""Routing traces as others write them, one file a form. Each module's docstring shows the layout it reads.

route_trace   BigMoeOnEdge's csv; route_rows its rows, quickly
token_jsonl   a JSON line for each token, with all its layers
layer_jsonl   a JSON line for each token and layer; json_lines reads the lines of both
routed_npz    `routed_experts` in a NumPy archive
arrange       what all of them end with: arrays and facts made a checked `Trace`
"""

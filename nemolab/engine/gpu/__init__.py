"""The engine on a CUDA card: how experts reach the arithmetic. Importing this imports neither torch nor triton."""

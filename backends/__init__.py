"""The torch, mlx and scripted backends; reached by name only."""

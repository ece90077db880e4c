"""Running: the runner, its inputs, results and monitor."""

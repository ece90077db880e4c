"""What a model costs: MACs, time, memory."""
